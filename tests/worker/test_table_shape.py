"""How wide a group's rows are, and what of them queries see."""

from typing import Any

import pytest

from kvplugin.errors import ConfigError
from kvplugin.spec import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from kvplugin.worker.block_table import BlockTables
from kvplugin.worker.context_parallel import ContextParallel
from kvplugin.worker.table_shape import table_shape
from tests.worker.naive import full, kernel_blocks, limits, state, table_of

HEADS: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8, "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("spec", "width"),
    [
        (full(16), 63),  # 1000 tokens in blocks of 16
        (SlidingWindowSpec(block_size=16, sliding_window=32, **HEADS), 63),
        (UniformTypeKVCacheSpecs(16, {"a": full(16)}), 63),
        (state(1000), 1),
        (state(1000, drafts=3), 4),
        (state(64, drafts=2), 18),
        (CrossAttentionSpec(block_size=16, **HEADS), 94),  # 1500 encoder tokens
        (EncoderOnlyAttentionSpec(block_size=16, **HEADS), 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_width_of_a_row(spec: KVCacheSpec, width: int) -> None:
    shape = table_shape(spec, limits(1000, max_num_encoder_input_tokens=1500))
    assert (shape.width, shape.columns, shape.ratio) == (width, width, 1)


MLA = MLAAttentionSpec(block_size=16, **HEADS)
WINDOW = SlidingWindowSpec(block_size=16, sliding_window=32, **HEADS)
CHUNKED = ChunkedLocalAttentionSpec(block_size=16, attention_chunk_size=64, **HEADS)


@pytest.mark.parametrize(
    ("spec", "width"),
    [
        (full(16), 16),
        (MLA, 16),
        (UniformTypeKVCacheSpecs(16, {"a": full(16), "b": full(16)}), 16),
        (UniformTypeKVCacheSpecs(16, {"a": MLA}), 16),
        (SinkFullAttentionSpec(block_size=16, sink_len=16, **HEADS), 16),
        (WINDOW, 63),
        (UniformTypeKVCacheSpecs(16, {"a": WINDOW}), 63),
        (CHUNKED, 63),
        (state(64), 16),
    ],
    ids=lambda value: type(value).__name__,
)
def test_context_parallelism_narrows_full_attention_and_its_kinds_only(
    spec: KVCacheSpec, width: int
) -> None:
    wide = limits(1000, decode_context_parallel_size=2, prefill_context_parallel_size=2)
    shape = table_shape(spec, wide)
    sharded = not isinstance(spec, MambaSpec) and width == 16
    assert (shape.width, shape.is_sharded) == (width, sharded)
    assert shape.ranks == (4 if sharded else 1)


@pytest.mark.parametrize(("ranks", "sizes"), [(1, (2, 1)), (2, (2, 2)), (2, (1, 1))])
def test_context_parallelism_of_limits_and_worker_is_the_same(
    ranks: int, sizes: tuple[int, int]
) -> None:
    bounds = limits(
        64,
        decode_context_parallel_size=sizes[0],
        prefill_context_parallel_size=sizes[1],
    )

    def tables(spec: KVCacheSpec) -> BlockTables:
        return BlockTables(
            [table_shape(WINDOW, bounds), table_shape(spec, bounds)],
            max_num_reqs=2,
            max_model_len=64,
            context_parallel=ContextParallel(ranks=ranks),
        )

    with pytest.raises(ConfigError) as raised:
        tables(full(16))
    for words in (
        f"ContextParallel.ranks is {ranks}, but the limits",
        "group 1",
        f"prefill_context_parallel_size = {sizes[0] * sizes[1]}",
    ):
        assert words in str(raised.value)
    tables(state(64))  # no group is shared out


@pytest.mark.parametrize(
    ("spec", "skipped"),
    [
        (full(16), lambda n: 0),
        (state(16), lambda n: 0),
        (WINDOW, lambda n: n - 31),
        (CHUNKED, lambda n: n // 64 * 64),
        (UniformTypeKVCacheSpecs(16, {"a": WINDOW}), lambda n: n - 31),
    ],
)
def test_blocks_out_of_sight_are_those_that_the_managers_count(
    spec: KVCacheSpec, skipped: Any
) -> None:
    shape = table_shape(spec, limits(1000), 8)
    for computed in range(300):
        blocks = max(skipped(computed), 0) // 16
        assert shape.num_skipped_blocks(computed) == blocks
        # Nothing that the query at `computed` sees is among them.
        sees = {
            token
            for token in range(computed + 1)
            if not (shape.sliding_window and token <= computed - shape.sliding_window)
            and not (
                shape.attention_chunk_size
                and token // shape.attention_chunk_size
                < computed // shape.attention_chunk_size
            )
        }
        assert min(sees) >= blocks * 16


def test_what_falls_out_of_a_window_becomes_null() -> None:
    bounds = limits(64)
    shapes = [
        table_shape(full(4), bounds, 2),
        table_shape(
            SlidingWindowSpec(block_size=4, sliding_window=6, **HEADS), bounds, 2
        ),
    ]
    tables = BlockTables(shapes, max_num_reqs=2, max_model_len=64)
    ids = [5, 6, 7, 8]
    tables.append(0, [ids, ids])
    tables.append(1, [ids, ids])
    tables.skip(0, 0, 8)
    whole = kernel_blocks(ids, 2)
    assert tables.tables[1].row(0) == whole
    tables.skip(0, 8, 13)  # 8 tokens are out of sight: two blocks
    assert tables.tables[1].row(0) == kernel_blocks([0, 0, 7, 8], 2)
    tables.skip(0, 13, 60)  # further than the row
    assert tables.tables[1].row(0) == kernel_blocks([0] * 4, 2)
    tables.append(0, [[], [9]])
    assert tables.tables[1].row(0) == kernel_blocks([0, 0, 0, 0, 9], 2)
    assert [table.row(1) for table in tables.tables] == [whole, whole]
    assert tables.tables[0].row(0) == whole
    assert not tables.sees_again(8, 13)
    assert tables.sees_again(13, 8)
    assert not tables.sees_again(8, 7)


def test_a_kernel_block_is_a_part_of_a_block() -> None:
    shape = table_shape(full(64), limits(1000), 16)
    assert (shape.width, shape.ratio, shape.columns) == (16, 4, 64)
    with pytest.raises(ConfigError, match="48 does not divide block_size 64"):
        table_shape(full(64), limits(1000), 48)


def test_pieces_of_context_parallelism_divide_a_block() -> None:
    with pytest.raises(ConfigError, match="cp_kv_cache_interleave_size 3 must divide"):
        table_of(16, place=ContextParallel(ranks=2, interleave=3))


@pytest.mark.parametrize(
    "values", [{"ranks": 0}, {"rank": -1}, {"rank": 2, "ranks": 2}, {"interleave": 0}]
)
def test_a_place_that_cannot_be(values: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"ContextParallel\."):
        ContextParallel(**values)
