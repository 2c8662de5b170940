"""Anything may happen to an engine with offload; here is what, and what must hold.

A `Life` is driven by whoever decides: `random_life` by a seed, hypothesis by its own
choices (`test_hybrid_machine.py`).
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any, Final, TypeVar

from kvplugin.contract import MISS
from kvplugin.errors import CapacityError
from kvplugin.request import RequestError
from kvplugin.testing import FakeTransport
from tests.offload.hybrid_host_content import assert_host_content
from tests.offload.hybrid_lab import HybridLab
from tests.offload.hybrid_mixes import MIXES, Mix
from tests.offload.hybrid_oracle import Prefill

T = TypeVar("T")
Fate = str | int
"""Of a job: a verb of the fake transport, blocks to tear it after, or none yet ("")."""

FATES: Final[tuple[Fate, ...]] = (*["complete"] * 7, "", "", "fail", "move", 1, 3)
DOCUMENTS: Final = [[*range(1000, 1060)], [*range(2000, 2060)]]
FRESH: Final = [*range(3000, 3050)]
TIMEOUT: Final = 5.0
"""Of transfers, in seconds."""
MOST: Final = 5
"""Requests at a time."""


def pick(some: Sequence[T], number: int) -> T:
    return some[number % len(some)]


class Life:
    """One engine, from its start to its end.

    Args:
        mix: the model.
        lab: further settings of `HybridLab`.
    """

    def __init__(self, mix: Mix, **lab: Any) -> None:
        offload = {"transfer_timeout_s": TIMEOUT, "lookup_wait_ms": 50}
        offload |= lab.pop("offload", {})
        self.lab = HybridLab(mix, offload=offload, **lab)
        self.happened: Counter[str] = Counter()
        self._has_room = lab.get("host", 1) >= 1
        self._epoch = self._checks = 0

    def served(self) -> None:
        """Both documents have been computed and stored; the engine has forgotten them,
        and from now on a job ends when the test says so."""
        for document in DOCUMENTS:
            self.lab.serve(document[:48])
        self.lab.forget_local()
        self.lab.hold()

    # -- what may happen -----------------------------------------------------------

    def arrive(
        self, document: int, shared: int, own: Sequence[int], n: int, salt: str = ""
    ) -> None:
        """A question on a document, of which it shares so many tokens."""
        if len(self.lab.scheduler.requests) >= MOST:
            return
        prompt = [*DOCUMENTS[document][:shared], *own]
        try:
            self.lab.add(prompt, n, cache_salt=salt or None)
        except RequestError:
            self.happened["refused"] += 1

    def go_on(
        self, fates: Sequence[Fate], steps: int, seconds: float, is_late: bool
    ) -> None:
        """Steps, and before each the jobs under way meet their fates in turn."""
        self.lab.witness.is_late = is_late
        turns = itertools.cycle(fates)
        for _ in range(steps):
            self.lab.now += seconds
            for transport in self.lab.transports:
                for job in transport.pending:
                    self._end(transport, job.id, job.store, next(turns))
            self.lab.step()

    def _end(
        self, transport: FakeTransport, job_id: int, is_store: bool, fate: Fate
    ) -> None:
        what = "store" if is_store else "load"
        if isinstance(fate, int):
            transport.tear(job_id, blocks=fate)
            self.happened[f"torn {what}"] += 1
        elif fate:
            getattr(transport, fate)(job_id)
            self.happened[f"{fate} {what}"] += 1

    def disturb_jobs(self, what: str, number: int) -> None:
        """A result comes twice, or a report, or all stores are waited for."""
        lab = self.lab
        transport = pick(lab.transports, number)
        if what == "result" and transport.ended:
            transport.repeat(pick(transport.ended, number))
        elif what == "report" and lab.witness.reports:
            lab.half.apply([pick(lab.witness.reports, number)])
        elif what == "drain":
            lab.half.apply([pick(lab.workers, number).drain()])
        self.happened[what] += 1

    def abort(self, number: int) -> None:
        """Nobody waits any longer for a request, in whatever state it is."""
        requests = self.lab.scheduler.requests
        if requests:
            entry = requests[pick(sorted(requests), number)]
            self.happened[f"abort {entry.status}"] += 1
            self.lab.scheduler.abort_request(entry.id)

    def preempt(self, number: int) -> None:
        """A request that runs loses its blocks between two steps."""
        roster = self.lab.scheduler._roster
        if roster.running:
            self.happened["preempt"] += 1
            roster.preempt(pick(roster.running, number))

    def lose_local(self, blocks: Sequence[int] | None) -> None:
        """The engine forgets blocks of its own, all of them if None."""
        if blocks is None:
            self.lab.forget_local()
        else:
            usable = self.lab.kv.block_pool.num_usable_blocks
            self.lab.kv.evict_blocks([b for b in blocks if b <= usable])

    def reset(self, *, reset_running: bool) -> None:
        """Both caches are emptied: nothing of before is offered any more."""
        done = self.lab.scheduler.reset_prefix_cache(reset_running=reset_running)
        self.happened[f"reset {done}"] += 1
        self._assert_nothing_is_offered()

    def change_weights(self) -> None:
        """All that was computed is of no use."""
        self._epoch += 1
        self.lab.scheduler.reset_prefix_cache(weight_epoch=self._epoch)
        self.happened["epoch"] += 1
        self._assert_nothing_is_offered()

    def _assert_nothing_is_offered(self) -> None:
        for document in DOCUMENTS:
            assert self.lab.offered(document) == MISS

    def time_goes_by(self, seconds: float) -> None:
        """Without a step."""
        self.happened["overdue"] += len(self.lab.transports[0].pending)
        self.lab.now += seconds

    # -- what must hold ------------------------------------------------------------

    def check(self) -> None:
        """At any time; what host memory holds is looked at now and then."""
        self.lab.check()
        self._checks += 1
        if self._checks % 4 == 0:
            assert_host_content(self.lab)

    def end(self) -> None:
        """Everything ends, and what comes then is served as if nothing had been."""
        lab = self.lab
        lab.witness.is_late = False
        lab.drain()
        if self._has_room:
            prefill = Prefill(lab.mix, len(FRESH), lab.budget, lab.blocks_per_chunk)
            lab.serve(FRESH)
            question = [*FRESH, 1, 2]
            offered = lab.offered(question, weight_epoch=self._epoch).tokens
            assert offered == prefill.offers(question, len(FRESH))
            lab.forget_local()
            lab.serve(question, 2)
            lab.drain()
        self.happened["loads"] += sum(map(len, self.lab.witness.credited.values()))


def random_life(
    name: str, seed: int, *, actions: int = 60, **settings: Any
) -> Counter[str]:
    """One life by a seed; what happened in it."""
    rnd = Random(f"{name} {seed}")
    try:
        life = Life(MIXES[name], **(_settings(rnd) | settings))
    except CapacityError:
        return Counter()
    life.served()
    weights = {
        _go_on: 10,
        _arrive: 5,
        _lose: 2,
        _disturb: 1,
        _preempt: 0.7,
        _abort: 0.7,
        _time_goes_by: 0.7,
        _reset: 0.4,
    }
    for action in rnd.choices([*weights], [*weights.values()], k=actions):
        action(life, rnd)
        life.check()
    life.end()
    return life.happened


def _settings(rnd: Random) -> dict[str, Any]:
    return {
        "ranks": rnd.choice([1, 2]),
        "depth": rnd.choice([1, 2]),
        "host": rnd.choice([4, 1, 0.3]),
        "budget": rnd.choice([16, 24, 8]),
        "kv_load_failure_policy": rnd.choice(["recompute", "recompute", "fail"]),
        "engine": {"asks_pending_work": rnd.random() < 0.8},
        "offload": {
            "blocks_per_chunk": rnd.choice([1, 1, 2, 3]),
            "offload_prompt_only": rnd.random() < 0.5,
            "min_load_tokens": rnd.choice([None, 1, 12]),
            "max_overdue_fraction": rnd.choice([0.1, 0.0, 1.0]),
        },
    }


def _go_on(life: Life, rnd: Random) -> None:
    fates = rnd.choices(FATES, k=5)
    life.go_on(fates, rnd.randrange(1, 5), rnd.choice([0.0, 0.05]), rnd.random() < 0.2)


def _arrive(life: Life, rnd: Random) -> None:
    own = [rnd.randrange(500) for _ in range(rnd.randrange(1, 9))]
    if rnd.random() < 0.4:
        life.lose_local(None)
    shared = rnd.choice([0, 8, 16, 17, 24, 31, 32, 40, 48, 48, 48])
    salt = rnd.choice(["", "", "", "s"])
    if rnd.random() < 0.3 and shared:
        own = []
    life.arrive(rnd.randrange(2), shared, own, rnd.randrange(1, 12), salt)


def _lose(life: Life, rnd: Random) -> None:
    some = [rnd.randrange(1, 40) for _ in range(rnd.randrange(6))]
    life.lose_local(rnd.choice([None, None, some]))


def _disturb(life: Life, rnd: Random) -> None:
    life.disturb_jobs(rnd.choice(["result", "report", "drain"]), rnd.randrange(99))


def _preempt(life: Life, rnd: Random) -> None:
    life.preempt(rnd.randrange(99))


def _abort(life: Life, rnd: Random) -> None:
    life.abort(rnd.randrange(99))


def _time_goes_by(life: Life, rnd: Random) -> None:
    life.time_goes_by(rnd.choice([1.0, TIMEOUT + 1]))


def _reset(life: Life, rnd: Random) -> None:
    if rnd.random() < 0.3:
        life.change_weights()
    else:
        life.reset(reset_running=rnd.random() < 0.5)
