"""Engines that do not say all that is needed: nothing is stored, nothing ends."""

import logging

import pytest

from kvplugin.contract import MISS, GroupKind
from tests.offload.half import Half, engine, group, request


@pytest.mark.parametrize("first", [3, 8])
@pytest.mark.parametrize("row", [[], [11]])
def test_a_row_that_is_not_whole_is_never_grown_into_one(
    first: int, row: list[int]
) -> None:
    """vLLM 0.19's MultiConnector names no blocks to the connectors that it did not
    choose: the next blocks of a row would be taken for its first."""
    half = Half(engine(group(GroupKind.FULL)))
    prompt = [*range(24)]
    view = request(prompt)
    half.admit(view, row[: (first - 1) // 4])
    assert half.store(view, 0, first) == {}
    assert half.store(view, first, 24 - first, new=([13, 14, 15, 16],)) == {}
    assert "r" not in half.scheduler.watched
    assert half.offered(prompt) == MISS


def test_a_local_hit_without_blocks_is_not_stored(
    caplog: pytest.LogCaptureFixture,
) -> None:
    half = Half(engine(group(GroupKind.FULL)))
    for name in ("a", "b"):
        view = request([*range(16)], name=name)
        half.admit(view, [], local=8)
        assert half.store(view, 8, 8, new=([13, 14],)) == {}
    (said,) = caplog.messages
    assert "did not name all blocks" in said


def test_without_the_engines_pool_it_is_idle_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    half = Half(engine(group(GroupKind.FULL)), is_bound=False)
    with caplog.at_level(logging.WARNING):
        for name in ("a", "b"):
            view = request([*range(16)], name=name)
            assert half.admit(view, [1, 2, 3, 4]) == MISS
            assert half.step(view, 0, 16) is None
            half.scheduler.finished(view)
    (said,) = caplog.messages
    assert "MultiConnector" in said
    half.scheduler.bind_blocks(half.blocks)
    view = request([*range(16)], name="c")
    half.admit(view, [1, 2, 3, 4])
    assert half.store(view, 0, 16) == {0: [1, 2, 3, 4]}
