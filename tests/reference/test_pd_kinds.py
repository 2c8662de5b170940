"""Every kind of layer and every mix: what the next token needs is what is read."""

import contextlib
from collections.abc import Sequence
from typing import Any

import pytest

from kvplugin.integration.reference import LayerConfig
from tests.reference.bench import shaped, tokens, window
from tests.reference.models import (
    CHUNKED,
    CROSS,
    DIFFKV,
    FULL,
    MIXES,
    MLA,
    RECORDS,
    RECURRENT,
    tiny,
)
from tests.reference.pd import Pair, spoil

LENGTHS = (1, 2, 7, 8, 9, 25, 32, 61)


def groups_of(pair: Pair) -> int:
    return len(pair.p.engine.plan.scheduler.kv_cache_groups)


def assert_groups_seen(pair: Pair, length: int = 59, **how: Any) -> None:
    """A wrong byte in what is read of any group would be seen. (Not of a chunk, if it
    is read up to its end: nobody reads it any more.)"""
    for group in range(groups_of(pair)):
        prompt = tokens(length, seed=100 + group)
        params = pair.prefill(prompt)
        spoil(pair.p.engine, params, group)
        with pytest.raises(AssertionError):
            pair.decode(prompt, params, **how)


@pytest.mark.parametrize("mix", MIXES)
def test_every_mix_of_layers_at_any_length(mix: str) -> None:
    with Pair(MIXES[mix], block_size=8) as pair:
        for length in LENGTHS:
            answer = pair.serve(tokens(length, seed=length))
            assert answer.num_cached_tokens == length - 1, f"{length} tokens"
        assert pair.d.count("failed_reads") == pair.d.count("missed_reads") == 0
        assert_groups_seen(pair)


def test_windows_and_chunks_travel_as_tails_only() -> None:
    """Of a window the blocks that the next token reads, of a chunk those of its own."""
    with Pair((FULL, window(10), CHUNKED), block_size=4) as pair:
        params = pair.prefill(tokens(100))
        counts = [len(row) for row in params["remote_block_ids"]]
        assert sorted(counts) == [1, 3, 25]
        assert pair.decode(tokens(100), params).num_cached_tokens == 99


@pytest.mark.parametrize("mode", ["none", "align", "all"])
@pytest.mark.parametrize("layers", [(RECURRENT,), (RECURRENT, FULL, window(9))])
def test_states_in_every_mode(layers: Sequence[LayerConfig], mode: str) -> None:
    """The producer leaves the last token of the prompt away: the consumer computes it
    on the state before it."""
    caching = mode != "none"
    with Pair(
        layers,
        block_size=8,
        mamba_cache_mode=mode,
        enable_prefix_caching=caching,
        max_num_batched_tokens=24,
    ) as pair:
        for length in (1, 2, 8, 9, 10, 40, 41):
            answer = pair.serve(tokens(length, seed=length), max_tokens=12)
            assert answer.num_cached_tokens == length - 1
        assert_groups_seen(pair)


@pytest.mark.parametrize("sizes", [(16, 16), (16, 32), (32, 16)])
def test_records_arrive_bit_by_bit(sizes: tuple[int, int]) -> None:
    """Their answers are those of the producer itself, had it gone on."""
    model = tiny((RECORDS, RECORDS), dtype="float32")
    theirs, ours = ({"block_size": size} for size in sizes)
    with Pair(model=model, producer=theirs, consumer=ours) as pair:
        prompt = tokens(50)
        answer = pair.serve(prompt, tolerance=0.5)
        assert answer.num_cached_tokens == 49
        alone = pair.p.add(prompt, 4, None)
        pair.until(lambda: pair.p.is_done(alone), "the same here")
        assert pair.p.answer(alone).log_probs == pytest.approx(answer.log_probs)
        assert pair.p.answer(alone).token_ids == answer.token_ids
        assert pair.d.engine.reset_prefix_cache()
        params = pair.prefill(prompt)
        spoil(pair.p.engine, params, 0)
        with contextlib.suppress(AssertionError):
            pair.decode(prompt, params, tolerance=0.5)
        spoiled = list(pair.d.engine.answers.values())[-1]
        assert spoiled.num_cached_tokens == 49
        assert spoiled.log_probs != pytest.approx(answer.log_probs)


@pytest.mark.parametrize("block_sizes", [(8, 16), (16, 8)])
def test_states_need_blocks_of_one_size(block_sizes: tuple[int, int]) -> None:
    """With others it is refused or read; the answer is right in any case."""
    theirs, ours = block_sizes
    with Pair(
        (RECURRENT, FULL),
        producer={"block_size": theirs},
        consumer={"block_size": ours},
    ) as pair:
        for length in (9, 33, 40):
            pair.serve(tokens(length, seed=length))
        assert pair.d.count("reads") + pair.d.count("missed_reads") == 3


def test_layers_that_the_other_side_does_not_have() -> None:
    """Another model under the same name: refused, and computed."""
    with Pair(producer={"model": shaped((FULL, FULL, FULL))}, block_size=8) as pair:
        assert pair.serve(tokens(30)).num_cached_tokens == 0
        assert pair.d.count("refused_peers") == 1


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ((FULL, window(10)), (FULL, window(14))),
        ((FULL, window(10)), (FULL, FULL)),
        ((MLA, MLA), (FULL, FULL)),
        ((DIFFKV, FULL), (FULL, FULL)),
        ((RECURRENT, FULL), (FULL, FULL)),
    ],
)
def test_models_that_read_otherwise_are_refused(
    theirs: Sequence[LayerConfig], ours: Sequence[LayerConfig]
) -> None:
    models = {
        "producer": {"model": shaped(theirs)},
        "consumer": {"model": shaped(ours)},
    }
    with Pair(block_size=8, **models) as pair:  # type: ignore[arg-type]
        assert pair.serve(tokens(30)).num_cached_tokens == 0
        assert pair.d.count("refused_peers") == 1
        assert pair.d.count("reads") == 0


def test_cross_attention_is_refused_at_the_start() -> None:
    with pytest.raises(Exception, match="cross"):
        Pair(
            model=tiny((CROSS, FULL)),
            enable_prefix_caching=False,
            max_num_encoder_input_tokens=8,
        )
