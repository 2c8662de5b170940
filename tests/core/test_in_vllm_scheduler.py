"""vLLM 0.19.1's own scheduler decides the same with our manager in its place."""

from typing import Any

import pytest

from tests.core import vllm_drives as drives
from tests.oracles import V019, ask
from tests.oracles.scheduler_drive import Run

MIXES = [
    [drives.FULL],
    [drives.WINDOW],
    [drives.FULL, drives.WINDOW],
    [drives.FULL, drives.WINDOW, drives.LONG_WINDOW],
    [drives.FULL, drives.CHUNKED],
    [drives.FULL, drives.mamba("align")],
]
SITUATIONS: list[dict[str, Any]] = [
    {},
    {"policy": "priority"},
    {"drafts": 2},
    {"enable_caching": False},
    {"reserve_full_isl": False},
]


def runs(seeds: range) -> list[Run]:
    no_drafts = (drives.CHUNKED, drives.mamba("align"))
    return [
        Run(groups, 10 + 35 * len(groups), seed, **situation)
        for seed in seeds
        for groups in MIXES
        for situation in SITUATIONS
        if "drafts" not in situation or not any(g in no_drafts for g in groups)
    ]


def compare(runs: list[Run]) -> None:
    preempted = 0
    for run, (theirs, ours) in zip(
        runs, ask(V019, "scheduler_runs", runs), strict=True
    ):
        assert len(theirs) == 2 * run.steps
        for i, (their, our) in enumerate(zip(theirs, ours, strict=True)):
            assert our == their, f"{run}, entry {i}"
        preempted += sum(bool(entry[5]) for entry in theirs if entry[0] == "step")
    assert preempted > len(runs) / 4, "the pool is too large to test anything"


def test_the_scheduler_decides_the_same() -> None:
    compare(runs(range(1)))


@pytest.mark.full
def test_the_scheduler_decides_the_same_for_long() -> None:
    compare(runs(range(1, 20)))
