"""Two engines, random requests, faults and times: every answer is a single engine's,
and both pools balance."""

import contextlib
import random
import time
from collections.abc import Sequence
from typing import Any

import pytest

from tests.reference.bench import tokens, window
from tests.reference.models import CHUNKED, FULL, RECURRENT
from tests.reference.pd import HANDS_OVER, PATIENCE, Pair, Time

MIXES: dict[str, Any] = {
    "full": ((FULL, FULL), {}, {}),
    "other blocks and heads": (
        (FULL, FULL),
        {"block_size": 8, "layout": "HND"},
        {"block_size": 12, "tensor_parallel_size": 2},
    ),
    "windows": ((FULL, window(10), CHUNKED), {}, {"block_size": 8}),
    "states": ((RECURRENT, FULL), {"block_size": 8}, {"block_size": 8}),
    "states, two steps in flight": (
        (RECURRENT, FULL, window(9)),
        {"block_size": 8, "pipeline_depth": 2},
        {"block_size": 8, "pipeline_depth": 2},
    ),
}
TIGHT: dict[str, Any] = {
    "num_blocks": 75,
    "max_model_len": 96,
    "max_num_batched_tokens": 40,
    "scheduler_reserve_full_isl": False,
}


class Clients:
    """Who asks a pair, and what they are told."""

    def __init__(self, pair: Pair, rng: random.Random, *clocks: Time) -> None:
        self.pair, self.rng, self.clocks = pair, rng, clocks
        self.prefills: dict[str, list[int]] = {}
        self.decodes: list[str] = []
        self.handed: list[tuple[list[int], Any]] = []
        self._worker: Any = pair.d.engine.worker_halves[0]
        self._submit = self._worker._reads.submit
        self._held: list[Any] = []
        self.holds = False
        self._worker._reads.submit = self._submitted

    def _submitted(self, *order: Any) -> None:
        if self.holds:
            self._held.append(order)
        else:
            self._submit(*order)

    def let_go(self) -> None:
        held, self._held = self._held, []
        for order in held:
            self._submit(*order)

    def act(self) -> None:
        """Something happens."""
        actions = [
            (6, self.ask),
            (8, self.pass_on),
            (1, self.lose),
            (1, self.cancel),
            (1, self.hold),
            (1, self.let_go),
            (1, self.time_passes),
            (1, self.forget),
        ]
        weights = [weight for weight, _ in actions]
        (action,) = self.rng.choices([a for _, a in actions], weights)
        action()

    def prompt(self) -> list[int]:
        head = tokens(self.rng.choice([0, 5, 16, 33]), seed=self.rng.randrange(3))
        return head + tokens(self.rng.randint(1, 30), seed=self.rng.randrange(1000))

    def ask(self) -> None:
        """A prompt for the prefill, or one that the decoder serves alone."""
        prompt = self.prompt()
        if self.rng.random() < 0.15:
            self.decodes.append(self.pair.d.add(prompt, 3, None))
        else:
            id_ = self.pair.p.add(prompt, self.rng.choice([1, 1, 1, 4]), HANDS_OVER)
            self.prefills[id_] = prompt

    def hear(self) -> None:
        for id_, prompt in list(self.prefills.items()):
            answer = self.pair.p.answer(id_)
            if answer.finish_reason is None:
                continue
            del self.prefills[id_]
            if answer.finish_reason != "abort":
                self.pair.p.compare(id_)
                tail = answer.token_ids if len(answer.token_ids) > 1 else []
                self.handed.append(([*prompt, *tail], answer.kv_transfer_params))

    def pass_on(self) -> None:
        """To the decoder, sometimes twice, with a longer prompt, or a wrong one."""
        if not self.handed:
            return
        prompt, params = self.handed.pop(self.rng.randrange(len(self.handed)))
        kind = self.rng.random()
        if kind < 0.1:
            prompt = [*prompt, *tokens(self.rng.randint(1, 20), seed=5)]
        elif kind < 0.2:
            prompt = self.prompt()
        elif kind < 0.25:
            params = {**params, "remote_request_id": "nobody's"}
        for seed in range(self.rng.choice([1, 1, 1, 2])):
            del seed
            most = self.rng.randint(1, 6)
            self.decodes.append(self.pair.d.add(prompt, most, params))

    def lose(self) -> None:
        """Nobody passes it on."""
        if self.handed:
            self.handed.pop()

    def cancel(self) -> None:
        for side in (self.pair.p, self.pair.d):
            running = list(side.engine.scheduler.requests)
            if running and self.rng.random() < 0.5:
                side.engine.abort(self.rng.choice(running))

    def hold(self) -> None:
        self.holds = not self.holds

    def time_passes(self) -> None:
        """On either side, or on both: leases run out, reads are given up."""
        seconds = self.rng.choice([1.0, 5.0, 20.0, 31.0])
        self.pass_time(seconds, *self.rng.sample(self.clocks, self.rng.randint(1, 2)))

    def pass_time(self, seconds: float, *clocks: Time) -> None:
        for clock in clocks or self.clocks:
            clock.now += seconds

    def forget(self) -> None:
        side = self.rng.choice([self.pair.p, self.pair.d])
        with contextlib.suppress(AssertionError):
            side.engine.reset_prefix_cache(local_only=True)

    def finish(self) -> None:
        """Everything ends, and every answer is right."""
        self.holds = False
        self.let_go()
        late = time.monotonic() + PATIENCE
        while self.prefills or not self.pair.d.is_done(*self.decodes):
            self.pair.step()
            self.hear()
            if time.monotonic() > late - PATIENCE / 2:
                self.pass_time(31)  # what hangs is given up, leases run out
            assert time.monotonic() < late, self.pair.d.engine.state()
        for id_ in self.decodes:
            if self.pair.d.answer(id_).token_ids:
                self.pair.d.compare(id_)
        for _ in range(3):
            self.pass_time(100)
            self.pair.step()


def run(mix: str, seed: int, *, actions: int = 120, **changes: Any) -> Clients:
    """Random requests of one mix.

    Returns:
        What was asked, and the counters of both sides.
    """
    layers, theirs, ours = MIXES[mix]
    rng, clocks = random.Random(f"{mix}{seed}"), (Time(), Time())
    with Pair(
        layers,
        connector={"kv_lease_duration": 30.0, "dead_peer_ttl_s": 1.0}
        | {"transfer_timeout_s": 30.0},
        producer=TIGHT | {"block_size": 4, "clock": clocks[0]} | theirs,
        consumer=TIGHT | {"block_size": 4, "clock": clocks[1]} | ours,
        **changes,
    ) as pair:
        clients = Clients(pair, rng, *clocks)
        for _ in range(actions):
            clients.act()
            for _ in range(rng.randint(0, 4)):
                pair.step()
                for side in (pair.p, pair.d):
                    side.engine.check()
            clients.hear()
        clients.finish()
        for side in (pair.p, pair.d):
            side.count("")
        return clients


def totals(clients: Sequence[Clients], side: str, name: str) -> float:
    return sum(getattr(c.pair, side).counters.get(name, 0) for c in clients)


@pytest.mark.parametrize("mix", MIXES)
def test_every_answer_is_a_single_engines(mix: str) -> None:
    assert totals([run(mix, seed=1)], "d", "reads")


@pytest.mark.full
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("mix", MIXES)
def test_the_same_for_long(mix: str, seed: int) -> None:
    run(mix, 100 + seed, actions=300)


@pytest.mark.full
def test_these_runs_see_what_they_are_about() -> None:
    """Over some seeds, everything that can go wrong did."""
    clients = [run(mix, seed) for mix in MIXES for seed in range(4)]
    for name in ("reads", "missed_reads", "given_up_reads", "discarded_reads"):
        assert totals(clients, "d", name), name
    for name in ("handovers", "closed_leases", "expired_leases"):
        assert totals(clients, "p", name), name
