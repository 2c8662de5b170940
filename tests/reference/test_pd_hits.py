"""What is read beside what is there already, and what is kept of it afterwards."""

from typing import Any

import pytest

from tests.reference.bench import tokens, window
from tests.reference.models import FULL, RECURRENT, forget_local
from tests.reference.pd import HANDS_OVER, Pair


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 33])
def test_the_last_block_may_be_partial(length: int) -> None:
    with Pair(block_size=16) as pair:
        assert pair.serve(tokens(length)).num_cached_tokens == length - 1
        assert pair.d.count("reads") == (length > 1)


@pytest.mark.parametrize("layers", [(FULL, FULL), (FULL, window(20))])
def test_only_what_a_local_hit_leaves_is_read(layers: Any) -> None:
    with Pair(layers, block_size=16) as pair:
        head = tokens(48)
        pair.d.add(head, 1, None)
        pair.until(lambda: not pair.d.engine.has_work(), "the head")
        before = pair.d.count("read_tokens")
        assert pair.serve([*head, *tokens(30, seed=2)]).num_cached_tokens == 77
        assert pair.d.count("read_tokens") - before == 77 - 48


def test_a_prompt_that_is_all_there_is_not_read() -> None:
    """And the producer's blocks come back at once."""
    with Pair(block_size=16) as pair:
        prompt = tokens(33)
        pair.decode(prompt, None)
        assert pair.serve(prompt).num_cached_tokens == 32
        assert pair.d.count("reads") == 0
        pair.drain()
        assert pair.p.count("closed_leases") == 1


@pytest.mark.parametrize("caching", [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize("layers", [(FULL, FULL), (RECURRENT, FULL, window(9))])
def test_with_and_without_prefix_caches(layers: Any, caching: Any) -> None:
    theirs, ours = caching
    with Pair(
        layers,
        producer={"enable_prefix_caching": theirs},
        consumer={"enable_prefix_caching": ours},
        block_size=8,
    ) as pair:
        for length in (9, 24, 33):
            answer = pair.serve(tokens(length, seed=length))
            assert answer.num_cached_tokens == length - 1


@pytest.mark.parametrize("layers", [(FULL, FULL), (FULL, window(10))])
def test_what_was_read_is_hit_by_others(layers: Any) -> None:
    """Full blocks of it, and never one whose beginning was not read."""
    with Pair(layers, block_size=8) as pair:
        prompt = tokens(50)
        pair.serve(prompt)
        again = pair.decode([*prompt, *tokens(9, seed=5)], None)
        # A local hit in a window needs more of it than the read brought.
        assert again.num_cached_tokens == (48 if layers == (FULL, FULL) else 0)
        # Shorter prompts need other parts of a window than were read.
        for length in range(41, 50):
            pair.decode(prompt[:length], None, max_tokens=1)


def test_few_tokens_are_computed_not_read() -> None:
    with Pair(connector={"min_load_tokens": 20}, block_size=8) as pair:
        assert pair.serve(tokens(20)).num_cached_tokens == 0
        assert pair.serve(tokens(21, seed=2)).num_cached_tokens == 20
        pair.drain()
        assert pair.p.count("closed_leases") == 2


def test_other_tokens_and_other_tenants_read_nothing() -> None:
    """A router that confuses two requests, or a client that tries it."""
    with Pair(block_size=8) as pair:
        prompt, other = tokens(40), tokens(40, seed=2)
        assert pair.decode(other, pair.prefill(prompt)).num_cached_tokens == 0
        params = pair.prefill(prompt, cache_salt="a")
        for salt in (None, "b"):
            answer = pair.decode(prompt, params, cache_salt=salt)
            assert answer.num_cached_tokens == 0
            forget_local(pair.d.engine)
            params = pair.prefill(prompt, cache_salt="a")
        assert pair.decode(prompt, params, cache_salt="a").num_cached_tokens == 39
        assert pair.d.count("reads") == 1


@pytest.mark.parametrize("shared", [0, 20, 63, 64, 65, 100, 130])
def test_a_prompt_that_begins_like_the_other_reads_what_it_can_trust(
    shared: int,
) -> None:
    """As far as the tokens are the same for certain: in steps of 64."""
    with Pair(block_size=8) as pair:
        prompt = tokens(140)
        params = pair.prefill(prompt)
        ours = [*prompt[:shared], *tokens(50, seed=shared + 1)]
        ours[shared] = (prompt[shared] + 1) % 61
        answer = pair.decode(ours, params)
        assert answer.num_cached_tokens == shared // 64 * 64


@pytest.mark.parametrize("layers", [(FULL, FULL), (RECURRENT, FULL), (FULL, window(9))])
def test_a_longer_prompt_goes_on_where_the_other_ended(layers: Any) -> None:
    with Pair(layers, block_size=8, max_num_batched_tokens=24) as pair:
        prompt = tokens(43)
        params = pair.prefill(prompt)
        held = params["remote_num_tokens"]
        ours = [*prompt, *tokens(70, seed=3)]
        assert pair.decode(ours, params, max_tokens=9).num_cached_tokens == held
        # What it left in the cache is right too.
        pair.decode([*ours, 5, 6, 7], None)


def test_several_samples_share_a_lease() -> None:
    """n readers: the blocks stay until the last one has read."""
    with Pair(block_size=8) as pair:
        prompt = tokens(40)
        params = pair.prefill(prompt)
        ids = [
            pair.d.add(prompt, 6, params, sampling={"temperature": 1.0, "seed": seed})
            for seed in range(5)
        ]
        pair.until(lambda: pair.d.is_done(*ids), "the samples")
        assert pair.d.count("reads") == 5
        assert len({tuple(pair.d.answer(id_).token_ids) for id_ in ids}) > 1
        for id_ in ids:
            assert pair.d.answer(id_).num_cached_tokens == 39
        pair.drain()
        assert pair.p.count("closed_leases") == 1


def test_a_request_that_is_not_to_be_handed_over_is_not() -> None:
    with Pair(block_size=8) as pair:
        for params in (None, {}, {"do_remote_decode": False}):
            id_ = pair.p.add(tokens(20), 2, params)
            pair.until(lambda id_=id_: pair.p.is_done(id_), "the answer")  # type: ignore[misc]
            assert pair.p.answer(id_).kv_transfer_params is None
        assert pair.p.count("handovers") == 0


def test_a_prefill_may_generate_more_than_one_token() -> None:
    """Then there is KV of all but the last one, and who goes on may use it."""
    with Pair(block_size=8) as pair:
        prompt = tokens(30)
        id_ = pair.p.add(prompt, 7, HANDS_OVER)
        pair.until(lambda: pair.p.is_done(id_), "the prefill")
        answer = pair.p.answer(id_)
        params = answer.kv_transfer_params
        assert params is not None
        assert params["remote_num_tokens"] == 36
        ours = [*prompt, *answer.token_ids]
        assert pair.decode(ours, params).num_cached_tokens == 36
