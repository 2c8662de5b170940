"""Random runs with offload: whatever happens, answers are those of the dense forward,
nothing is read that nobody wrote, and everything comes back."""

import random
from typing import Any

import pytest

from kvplugin.contract import CopyJob
from kvplugin.integration.reference import ReferenceEngine
from kvplugin.testing import (
    COMPLETES,
    FAILS,
    LATE,
    NEVER_ENDS,
    REPORTED_LATE,
    TORN,
    TWICE,
    Fate,
)
from tests.reference.bench import BLOCK_BYTES, Bench, tokens
from tests.reference.models import MIXES, fewest_blocks, settings
from tests.reference.test_offload_mixes import bytes_of_the_longest

FATES = [*[COMPLETES] * 4, LATE, REPORTED_LATE, TWICE, FAILS, TORN]
ROUNDS = 60


class Run:
    """One run; everything in it comes from the seed."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.now, self.hanging = 0.0, 2
        mix = rng.choice(list(MIXES))
        changes: dict[str, Any] = {
            "max_model_len": 64,
            "max_num_batched_tokens": rng.choice([24, 40]),
            "tensor_parallel_size": rng.choice([1, 1, 2]),
            "pipeline_depth": rng.choice([1, 2]),
            "mamba_cache_mode": rng.choice(["align", "all"]),
        }
        if rng.random() < 0.4:
            changes |= {"num_drafts": 2}
        whole = Bench(MIXES[mix], **changes, **self._drafter(changes))
        few = fewest_blocks(whole.model, settings(**changes))
        self.bench = Bench(
            MIXES[mix],
            fate=self._fate,
            host_blocks=3 * bytes_of_the_longest(whole) // BLOCK_BYTES,
            num_blocks=2 * few + rng.randrange(20),
            offload={
                "blocks_per_chunk": rng.choice([1, 1, 2, 3]),
                "offload_prompt_only": rng.random() < 0.3,
                "transfer_timeout_s": 1.0,
                "lookup_wait_ms": 300,
            },
            clock=lambda: self.now,
            scheduler_reserve_full_isl=False,
            **changes,
            **self._drafter(changes),
        )
        self.description = f"{mix} {changes}"

    @staticmethod
    def _drafter(changes: dict[str, Any]) -> dict[str, Any]:
        return {"right": 0.5} if "num_drafts" in changes else {}

    @property
    def engine(self) -> ReferenceEngine:
        return self.bench.engine

    def _fate(self, job: CopyJob) -> Fate:
        if self.hanging and self.rng.random() < 0.03:
            self.hanging -= 1
            return NEVER_ENDS
        return self.rng.choice(FATES)

    def go(self) -> None:
        for _ in range(ROUNDS):
            self._act()
            self.engine.step()
            self.engine.check()
            self.now += 0.1
        for transport in self.bench.transports:
            transport.release()
        self.bench.finish()
        assert self.engine.reset_prefix_cache()

    def _act(self) -> None:
        rng, engine = self.rng, self.engine
        if len(engine.scheduler.requests) < 5 and rng.random() < 0.6:
            document = tokens(rng.choice([13, 24, 33]), rng.randrange(2))
            question = tokens(rng.randrange(1, 12), rng.randrange(3))
            self.bench.add([*document, *question], rng.randrange(1, 18))
        if engine.scheduler.requests and rng.random() < 0.05:
            engine.abort(rng.choice(list(engine.scheduler.requests)))
        if rng.random() < 0.15:
            engine.reset_prefix_cache(local_only=rng.random() < 0.8)


@pytest.mark.parametrize(
    "seed",
    [*range(6), *(pytest.param(n, marks=pytest.mark.full) for n in range(6, 80))],
)
def test_whatever_happens(seed: int) -> None:
    run = Run(seed)
    try:
        run.go()
    except BaseException as error:
        error.add_note(run.description)
        raise
