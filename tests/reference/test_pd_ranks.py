"""Tensor-parallel ranks: as many on both sides, or more on either."""

from typing import Any

import pytest

from kvplugin.integration.reference import LayerConfig
from tests.reference.bench import shaped, tokens, window
from tests.reference.models import FULL, MLA, RECURRENT, tiny
from tests.reference.pd import Pair, spoil

PROMPT = tokens(70)
RATIOS = [(1, 2), (2, 1), (2, 4), (4, 2), (2, 2)]


def ranks(theirs: int, ours: int, **both: Any) -> dict[str, Any]:
    return {
        "producer": {"tensor_parallel_size": theirs},
        "consumer": {"tensor_parallel_size": ours},
        "block_size": 16,
    } | both


@pytest.mark.parametrize("heads", [4, 2, 1])
@pytest.mark.parametrize(("theirs", "ours"), RATIOS)
def test_heads_that_are_shared_out_otherwise(
    theirs: int, ours: int, heads: int
) -> None:
    """With fewer heads than ranks several ranks hold the same one."""
    model = tiny((FULL, FULL), num_kv_heads=heads)
    with Pair(model=model, **ranks(theirs, ours)) as pair:
        assert pair.serve(PROMPT).num_cached_tokens == len(PROMPT) - 1
        params = pair.prefill(other := tokens(70, seed=2))
        spoil(pair.p.engine, params, 0)
        with pytest.raises(AssertionError):
            pair.decode(other, params)


@pytest.mark.parametrize(("theirs", "ours"), [(1, 2), (4, 2)])
def test_heads_blocks_and_orders_at_once(theirs: int, ours: int) -> None:
    changes = ranks(theirs, ours)
    changes["producer"] |= {"layout": "HND", "block_size": 48}
    changes["consumer"] |= {"layout": "NHD", "block_size": 32}
    with Pair((FULL, window(40)), **changes) as pair:
        for length in (70, 33, 96):
            answer = pair.serve(tokens(length, seed=length))
            assert answer.num_cached_tokens == length - 1


@pytest.mark.parametrize(("theirs", "ours"), [(1, 2), (2, 1)])
def test_latents_are_the_same_on_every_rank(theirs: int, ours: int) -> None:
    with Pair((MLA, MLA), **ranks(theirs, ours)) as pair:
        assert pair.serve(PROMPT).num_cached_tokens == len(PROMPT) - 1


STATES: tuple[LayerConfig, ...] = (RECURRENT, FULL)


@pytest.mark.parametrize(("theirs", "ours"), RATIOS)
def test_states_are_shared_out_by_heads(theirs: int, ours: int) -> None:
    with Pair(model=shaped(STATES), **ranks(theirs, ours)) as pair:
        assert pair.serve(PROMPT).num_cached_tokens == len(PROMPT) - 1
        params = pair.prefill(other := tokens(70, seed=2))
        spoil(pair.p.engine, params, 0)
        with pytest.raises(AssertionError):
            pair.decode(other, params)


def test_a_rank_that_cannot_read_fails_the_read_for_all() -> None:
    with Pair(**ranks(2, 2)) as pair:
        worker: Any = pair.d.engine.worker_halves[1]
        params = pair.prefill(PROMPT)
        refuse = worker._refusal_of
        worker._refusal_of = lambda order: "broken by the test"
        assert pair.decode(PROMPT, params).num_cached_tokens == len(PROMPT) - 1
        assert pair.d.count("failed_reads") == 1
        worker._refusal_of = refuse
