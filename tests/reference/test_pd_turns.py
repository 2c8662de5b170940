"""Turns of a conversation: the next prefill reads from the decoder what that has."""

from typing import Any

import pytest

from kvplugin.connectors.nixl.config import Role
from tests.reference.bench import tokens, window
from tests.reference.models import FULL, RECURRENT
from tests.reference.pd import Pair, Time, spoil

BACK: dict[str, Any] = {"bidirectional_kv_xfer": True, "kv_recompute_threshold": 8}


def first_turn(pair: Pair, prompt: list[int], max_tokens: int = 9) -> tuple[Any, Any]:
    answer = pair.serve(prompt, max_tokens)
    params = answer.kv_transfer_params
    assert params is not None
    assert params["do_remote_decode"]
    return [*prompt, *answer.token_ids], dict(params)


def second_turn(pair: Pair, prompt: list[int], params: Any) -> int:
    """Prefilled with what the decoder has, then decoded; tokens that the prefill did
    not have to compute."""
    id_ = pair.p.add(prompt, 1, params)
    pair.until(lambda: pair.p.is_done(id_), "the second prefill")
    pair.p.compare(id_)
    handed = pair.p.answer(id_).kv_transfer_params
    assert handed is not None
    assert handed["do_remote_prefill"]
    pair.decode(prompt, handed)
    return pair.p.answer(id_).num_cached_tokens


@pytest.mark.parametrize("layers", [(FULL, FULL), (FULL, window(10))])
@pytest.mark.parametrize("sizes", [(8, 8), (16, 8), (8, 16)])
def test_the_second_turn_is_read_back_from_the_decoder(
    layers: Any, sizes: tuple[int, int]
) -> None:
    with Pair(
        layers,
        connector=BACK,
        clock=(clock := Time()),
        producer={"block_size": sizes[0], "enable_prefix_caching": False},
        consumer={"block_size": sizes[1]},
    ) as pair:
        known, params = first_turn(pair, tokens(40))
        assert params["remote_num_tokens"] == len(known) - 1
        prompt = [*known, *tokens(20, seed=2)]
        read = second_turn(pair, prompt, params)
        assert read == len(known) - 1
        assert pair.p.count("reads") == 1
        clock.now += 1000  # nobody has a third turn


def test_states_are_read_back_where_the_decoder_has_them() -> None:
    """Of the tokens whose KV it holds, the last state; the prefill goes on from it."""
    with Pair(
        (RECURRENT, FULL),
        connector=BACK,
        clock=(clock := Time()),
        block_size=8,
        producer={"enable_prefix_caching": False},
    ) as pair:
        known, params = first_turn(pair, tokens(40))
        prompt = [*known, *tokens(20, seed=2)]
        assert second_turn(pair, prompt, params) == len(known) - 1
        clock.now += 1000


def test_a_wrong_byte_in_what_comes_back_would_be_seen() -> None:
    with Pair(
        connector=BACK,
        clock=(clock := Time()),
        block_size=8,
        producer={"enable_prefix_caching": False},
    ) as pair:
        known, params = first_turn(pair, tokens(40))
        spoil(pair.d.engine, params, 0)
        with pytest.raises(AssertionError):
            second_turn(pair, [*known, *tokens(20, seed=2)], params)
        clock.now += 1000


def test_few_new_tokens_are_not_fetched_back() -> None:
    with Pair(
        connector=BACK | {"kv_recompute_threshold": 30},
        clock=(clock := Time()),
        block_size=8,
    ) as pair:
        known, params = first_turn(pair, tokens(40))
        prompt = [*known, *tokens(5, seed=2)]
        id_ = pair.p.add(prompt, 1, params)
        pair.until(lambda: pair.p.is_done(id_), "the second prefill")
        assert pair.p.answer(id_).num_cached_tokens == 40
        assert pair.p.count("reads") == 0
        handed = pair.p.answer(id_).kv_transfer_params
        pair.decode(prompt, handed, max_tokens=1)
        clock.now += 1000


def test_engines_that_are_both_read_and_hand_over() -> None:
    """Two engines, each of which prefills for the other."""
    with Pair(
        producer={"role": Role.BOTH},
        consumer={"role": Role.BOTH},
        block_size=8,
    ) as pair:
        prompt, other = tokens(30), tokens(35, seed=2)
        assert pair.serve(prompt).num_cached_tokens == 29
        pair.p, pair.d = pair.d, pair.p
        assert pair.serve(other).num_cached_tokens == 34
        pair.p, pair.d = pair.d, pair.p
