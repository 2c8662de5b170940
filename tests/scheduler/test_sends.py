"""Blocks that a connector still reads after their request has ended."""

from itertools import permutations

import pytest

from kvplugin.contract import NOTHING_HAPPENED, WorkerOutcome
from kvplugin.request import RequestError
from tests.scheduler.harness import Harness

SENT = WorkerOutcome(finished_sends=frozenset(["a"]))


def sending(ranks: int) -> Harness:
    """Two blocks of a request that has ended."""
    engine = Harness(connects=True, ranks=ranks)
    engine.connector.keeps.add("a")
    engine.add("a", range(8))
    engine.step()
    assert engine.reasons == {"a": "length"}
    return engine


@pytest.mark.parametrize("order", permutations(range(3)))
def test_blocks_are_kept_until_every_rank_has_announced_it(order: list[int]) -> None:
    engine = sending(ranks=3)
    for rank in order:
        assert engine.kv.block_pool.num_used_blocks == 2
        for _ in range(1 + (rank != order[-1])):  # once more means nothing
            outcomes = [NOTHING_HAPPENED] * 3
            outcomes[rank] = SENT
            engine.step(*outcomes)
    assert engine.kv.block_pool.num_used_blocks == 0
    engine.run()
    assert engine.is_idle()


def test_the_id_is_in_use_until_then() -> None:
    engine = sending(ranks=1)
    with pytest.raises(RequestError, match="'a' is in use"):
        engine.add("a", range(50, 58))
    engine.step(SENT)
    engine.connector.keeps.clear()
    engine.add("a", range(50, 58))
    engine.run()
    assert engine.is_idle()


def test_ends_of_no_send_mean_nothing() -> None:
    engine = sending(ranks=1)
    engine.step(WorkerOutcome(finished_sends=frozenset(["b"])))
    assert engine.kv.block_pool.num_used_blocks == 2
    engine.step(SENT)
    engine.step(SENT)
    assert engine.is_idle()
