"""Long random runs in a pool that is too small, judged by the laboratory's oracles."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import Any

import pytest

from kvplugin.request import RequestError
from kvplugin.spec import KVCacheSpec
from tests.core.manager_setups import chunk, full, mamba, window
from tests.testing.lab import Lab

DRAFTS = 2
STEPS = 100
"""Random actions of a run before it is drained."""


@dataclass(frozen=True)
class Mix:
    """Groups, and a pool in which two or three long requests do not fit."""

    specs: Callable[[int], tuple[KVCacheSpec, ...]]
    """Groups of a model with this many drafts a step."""
    usable: int


MIXES = {
    "full": Mix(lambda _: (full(),), 16),
    "window": Mix(lambda _: (window(10),), 8),
    "full+window": Mix(lambda _: (full(), window(6)), 22),
    "full+two windows": Mix(lambda _: (full(), window(6), window(11)), 28),
    "full+coarse window": Mix(lambda _: (full(), window(10, 8)), 20),
    "chunk+full": Mix(lambda _: (chunk(8), full()), 22),
    "full+states": Mix(lambda n: (full(), mamba("all", drafts=n)), 28),
    "full+aligned states": Mix(lambda n: (full(), mamba("align", drafts=n)), 24),
}


class PressedLab(Lab):
    """A laboratory in which anything happens by a seed."""

    def __init__(
        self,
        specs: Sequence[KVCacheSpec],
        usable: int,
        *,
        seed: int = 0,
        synchronous: bool = False,
        drafts: int = 0,
        **settings: Any,
    ) -> None:
        super().__init__(
            specs,
            usable,
            synchronous=synchronous,
            drafts=drafts,
            lookahead=drafts,
            **settings,
        )
        self.random = Random(seed)
        self.synchronous = synchronous
        self.happened: Counter[str] = Counter()

    # -- what may happen -----------------------------------------------------------

    def arrive(self) -> None:
        """A request, mostly with a prefix that others have."""
        if len(self.scheduler.requests) >= 6:
            return
        rnd = self.random
        shared = rnd.randrange(0, 33)
        first = 100 * rnd.randrange(2)
        prompt = [*range(first, first + shared)]
        prompt += [rnd.randrange(500) for _ in range(rnd.randrange(1, 10))]
        offered = rnd.choice([0, 1, 1]) * rnd.randrange(len(prompt) + 1)
        id_ = f"r{len(self.requests)}"
        if rnd.random() < 0.3:
            self.worker.fails.add(id_)
        if rnd.random() < 0.1:
            self.remote.undecided.add(id_)
        by_priority = self.scheduler.config.policy == "priority"
        n, priority = rnd.randrange(1, 14), rnd.randrange(4) if by_priority else 0
        try:
            self.add(prompt, n, remote_tokens=offered, priority=priority)
        except RequestError:
            self.happened["refused"] += 1

    def decide(self) -> None:
        """The connector knows by now what it has."""
        self.remote.undecided.clear()

    def abort(self) -> None:
        """Somebody does not wait any longer, in whatever state the request is."""
        if self.scheduler.requests:
            id_ = self.random.choice(sorted(self.scheduler.requests))
            self.happened["aborts"] += 1
            self.scheduler.abort_request(id_)

    def reset(self) -> None:
        """The cache is emptied under requests that run."""
        before = self.num_preemptions
        self.scheduler.reset_prefix_cache(reset_running=True)
        self.happened["preempted by resets"] += self.num_preemptions - before

    def end_a_load(self) -> None:
        """Some load under way ends in some way."""
        if not self.transport.pending:
            return
        job = self.random.choice(self.transport.pending)
        how = self.random.choice(["complete", "complete", "fail", "tear", "move"])
        self.happened[how] += 1
        if how == "tear":
            blocks = [block for _, ids, _ in job.parts for block in ids]
            arrived = self.random.randrange(len(blocks))
            request_id = self.remote.loads[job.id].request_id
            if self.random.random() < 0.5:
                self.worker.failed_blocks[request_id] = blocks[arrived:]
            self.transport.tear(job.id, arrived)
        else:
            getattr(self.transport, how)(job.id)

    def repeat_a_report(self) -> None:
        """A report comes twice, of a request that has ended. Not while another of its
        transfers goes on: which one was meant, its worker half must know."""
        loads = self.remote.loads
        busy = {loads[job.id].request_id for job in self.transport.pending}
        busy |= self.scheduler.requests.keys()
        ended = [
            job for job in self.transport.ended if loads[job].request_id not in busy
        ]
        if ended:
            self.transport.repeat(self.random.choice(ended))

    def time_goes_by(self) -> None:
        """Loads under way are overdue."""
        self.now += 1000
        self.happened["overdue"] += len(self.transport.pending)

    def go(self, steps: int = STEPS) -> None:
        """A run, and its judgement."""
        actions = {
            self.step: 12,
            self.arrive: 6,
            self.end_a_load: 2,
            self.abort: 0.7,
            self.decide: 1,
            self.repeat_a_report: 0.5,
            self.time_goes_by: 1,
            self.reset: 0.4,
        }
        names, weights = list(actions), list(actions.values())
        for action in self.random.choices(names, weights, k=steps):
            action()
            self.check()
        self.decide()
        self.drain()
        self.happened["synchronous failures"] += (
            len(self.remote.distrusted) if self.synchronous else 0
        )
        if not self.synchronous:
            pressed = self.num_preemptions - self.happened["preempted by resets"]
            self.happened["preemptions"] += pressed

    @property
    def num_preemptions(self) -> int:
        return sum(request.num_preemptions for request in self.requests.values())


def run(
    name: str,
    seed: int,
    *,
    depth: int,
    synchronous: bool,
    drafts: int = 0,
    **settings: Any,
) -> Counter[str]:
    """One run; what happened in it."""
    mix = MIXES[name]
    lab = PressedLab(
        mix.specs(drafts),
        mix.usable + 2 * drafts,
        seed=seed,
        depth=depth,
        synchronous=synchronous,
        drafts=drafts,
        **settings,
    )
    lab.go()
    return lab.happened


def runs(name: str, seeds: Sequence[int]) -> Counter[str]:
    """Runs of every kind."""
    happened: Counter[str] = Counter()
    for seed, synchronous in product(seeds, (False, True)):
        for depth, drafts in ((1, 0), (2, 0), (1, DRAFTS), (2, DRAFTS)):
            happened += run(
                name,
                seed,
                depth=depth,
                synchronous=synchronous,
                drafts=drafts,
                policy="priority" if seed % 2 else "fcfs",
                kv_load_failure_policy="fail" if seed % 3 == 2 else "recompute",
            )
    return happened


WANTED = (
    *("preemptions", "aborts", "complete", "fail", "tear", "move", "overdue"),
    "synchronous failures",
)


def assert_all_happened(happened: Counter[str]) -> None:
    missing = [what for what in WANTED if not happened[what]]
    assert not missing, f"the runs are too tame: {happened}"


@pytest.mark.parametrize("name", MIXES)
def test_random_runs(name: str) -> None:
    assert_all_happened(runs(name, range(3)))


@pytest.mark.full
@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("first", range(100, 500, 50))
def test_many_random_runs(name: str, first: int) -> None:
    assert_all_happened(runs(name, range(first, first + 50)))
