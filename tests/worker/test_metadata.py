"""What backends are told of a step is what the requests say, once a group."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplugin.errors import CapacityError, ConfigError
from kvplugin.scheduler import SchedulerOutput
from kvplugin.scheduler.output import NewRequestData
from kvplugin.spec import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from kvplugin.worker.backend_table import BACKENDS
from kvplugin.worker.batch import StepBatch, WorkerBatch, WorkerRequest
from kvplugin.worker.block_table import BlockTables
from kvplugin.worker.context_parallel import ContextParallel
from kvplugin.worker.kernel_blocks import MultipleOf
from kvplugin.worker.metadata import MetadataBuilder, StepMetadata
from kvplugin.worker.table_shape import table_shape
from kvplugin.worker.tensors import allocate_kv_cache
from tests.worker import naive
from tests.worker.naive import full, kernel_blocks, limits, state

MAX_LEN, BLOCK, KERNEL_BLOCK = 64, 4, 2
GROUPS = (
    KVCacheGroupSpec(("a.0", "a.1", "b.9"), full(BLOCK), {"b.9": "a.1"}),
    KVCacheGroupSpec(("state.0",), state(MAX_LEN)),
)


@dataclass(frozen=True)
class Part:
    """One request's part of a step."""

    computed: int
    scheduled: int
    drafts: int


@st.composite
def parts(draw: st.DrawFn) -> Part:
    scheduled = draw(st.integers(1, 9))
    computed = draw(st.integers(0, MAX_LEN - scheduled))
    return Part(computed, scheduled, draw(st.integers(0, scheduled - 1)))


def built(
    step: list[Part],
    place: ContextParallel = ContextParallel(),  # noqa: B008
    common: tuple[int, ...] = (),
    **padding: int,
) -> tuple[StepMetadata, list[list[int]]]:
    """Metadata of requests r0, r1, ... and their blocks in the first group."""
    bounds = limits(MAX_LEN, decode_context_parallel_size=place.ranks)
    shapes = [
        table_shape(GROUPS[0].kv_cache_spec, bounds, KERNEL_BLOCK),
        table_shape(GROUPS[1].kv_cache_spec, bounds),
    ]
    tables = BlockTables(
        shapes, max_num_reqs=8, max_model_len=MAX_LEN, context_parallel=place
    )
    width = shapes[0].width
    ids = [[1 + i * width + j for j in range(width)] for i in range(len(step))]
    news = [
        NewRequestData(f"r{i}", [0] * MAX_LEN, (ids[i], [500 + i]), part.computed)
        for i, part in enumerate(step)
    ]
    output = SchedulerOutput(
        1,
        news,
        num_scheduled_tokens={f"r{i}": p.scheduled for i, p in enumerate(step)},
        scheduled_spec_decode_tokens={
            f"r{i}": [0] * p.drafts for i, p in enumerate(step)
        },
        num_common_prefix_blocks=common,
    )
    batch = WorkerBatch(tables)
    return MetadataBuilder(GROUPS, tables, 80).build(
        batch.apply(output), **padding
    ), ids


@settings(max_examples=100, deadline=None)
@given(st.lists(parts(), max_size=6), st.integers(0, 2), st.integers(0, 5))
def test_a_step_is_described_as_it_is(
    step: list[Part], more_reqs: int, more_tokens: int
) -> None:
    total = sum(part.scheduled for part in step)
    num_reqs = len(step) + more_reqs
    metadata, ids = built(step, padded_reqs=num_reqs, padded_tokens=total + more_tokens)
    batch = metadata.batch
    starts, logits, tokens = [0], [], []
    for i, part in enumerate(step):
        tokens += [(i, part.computed + j) for j in range(part.scheduled)]
        starts.append(len(tokens))
        logits += range(len(tokens) - 1 - part.drafts, len(tokens))
    padding = [0] * more_reqs
    assert batch.query_start_loc.tolist() == starts + [total] * more_reqs
    assert batch.seq_lens.tolist() == [p.computed + p.scheduled for p in step] + padding
    assert batch.num_computed.tolist() == [p.computed for p in step] + padding
    assert batch.query_lens == tuple(part.scheduled for part in step)
    assert (batch.num_reqs, batch.num_tokens) == (len(step), total)
    assert batch.max_query_len == max((p.scheduled for p in step), default=0)
    longest = max((p.computed + p.scheduled for p in step), default=0)
    assert batch.max_seq_len == longest
    assert batch.logits_indices.tolist() == logits
    assert batch.rows.tolist() == [row for row, _ in tokens] + [-1] * more_tokens
    assert batch.positions.tolist() == [at for _, at in tokens] + [0] * more_tokens
    attention, states = metadata.groups
    slots = [naive.slot(ids[row], at, BLOCK) for row, at in tokens]
    assert attention.slots.tolist() == slots + [-1] * more_tokens
    assert states.slots.tolist() == [-1] * (total + more_tokens)
    width = MAX_LEN // KERNEL_BLOCK
    expected = [kernel_blocks(row, 2) for row in ids] + [[0] * width] * more_reqs
    assert attention.block_table.tolist() == expected
    assert states.block_table.flatten().tolist() == [
        *(500 + i for i in range(len(step))),
        *padding,
    ]
    assert (attention.block_size, states.block_size) == (KERNEL_BLOCK, MAX_LEN)
    for group in metadata.groups:
        assert group.kv_lens is batch.seq_lens


def test_layers_of_a_group_get_the_same_object() -> None:
    metadata, _ = built([Part(0, 3, 0)])
    attention, states = metadata.groups
    for name in GROUPS[0].layer_names:
        assert metadata.layers[name] is attention
    assert metadata.layers["state.0"] is states
    assert len(metadata.layers) == 4
    assert attention.batch is states.batch is metadata.batch


@settings(deadline=None)
@given(st.lists(parts(), min_size=1, max_size=4), st.integers(0, 2))
def test_context_parallel_ranks_see_their_share(step: list[Part], rank: int) -> None:
    place = ContextParallel(ranks=3, rank=rank, interleave=2)
    metadata, ids = built(step, place)
    attention, states = metadata.groups
    ends = [part.computed + part.scheduled for part in step]
    assert attention.kv_lens.tolist() == [
        sum(position // 2 % 3 == rank for position in range(end)) for end in ends
    ]
    assert states.kv_lens.tolist() == ends
    tokens = [
        (i, part.computed + j)
        for i, part in enumerate(step)
        for j in range(part.scheduled)
    ]
    assert attention.slots.tolist() == [
        naive.slot(ids[i], at, BLOCK, place) for i, at in tokens
    ]


@pytest.mark.parametrize(
    ("computed", "common", "length"),
    [
        ((12, 20), 2, 8),
        ((7, 20), 2, 4),  # the first request still computes the second block
        ((0, 20), 2, 0),
        ((12, 20), 0, 0),
    ],
)
def test_the_common_prefix_is_whole_blocks_that_all_have_computed(
    computed: tuple[int, ...], common: int, length: int
) -> None:
    step = [Part(count, 1, 0) for count in computed]
    metadata, _ = built(step, common=(common, 0))
    assert [group.common_prefix_len for group in metadata.groups] == [length, 0]
    metadata, _ = built(step)
    assert [group.common_prefix_len for group in metadata.groups] == [0, 0]


def test_the_common_prefix_counts_blocks_of_all_ranks() -> None:
    metadata, _ = built([Part(30, 1, 0)], ContextParallel(ranks=2), common=(3, 0))
    assert metadata.groups[0].common_prefix_len == 24


@pytest.mark.parametrize(
    ("padding", "words"),
    [
        (
            {"padded_reqs": 9},
            "a step padded to 9 requests, but max_num_seqs of this worker is 8: pad",
        ),
        ({"padded_reqs": 0}, "a step of 1 requests can't be padded to 0"),
        (
            {"padded_tokens": 81},
            "padded to 81 tokens, but max_num_batched_tokens of this worker is 80",
        ),
        ({"padded_tokens": 2}, "a step of 3 tokens can't be padded to 2"),
    ],
)
def test_padding_that_cannot_be(padding: dict[str, int], words: str) -> None:
    with pytest.raises(CapacityError, match=words):
        built([Part(0, 3, 0)], **padding)


def test_a_step_of_more_tokens_than_there_is_room_for() -> None:
    with pytest.raises(CapacityError, match="of 90 tokens, but max_num_batched_tokens"):
        built([Part(0, 45, 0)] * 2)


def builder(tables: BlockTables, *groups: KVCacheGroupSpec) -> MetadataBuilder:
    return MetadataBuilder(groups, tables, 16)


def test_as_many_groups_as_tables() -> None:
    with pytest.raises(ConfigError, match="2 groups, 1 tables"):
        builder(naive.table_of(4), *GROUPS)


@pytest.mark.parametrize(("tables", "views"), [(2, 4), (4, 2)])
def test_tables_and_views_count_in_the_same_blocks(tables: int, views: int) -> None:
    spec, other = full(BLOCK), state(MAX_LEN)
    groups = (KVCacheGroupSpec(("a",), spec), KVCacheGroupSpec(("m",), other))
    page = other.page_size_bytes
    config = KVCacheConfig(
        3,
        (
            KVCacheTensor(3 * spec.page_size_bytes, ("a",)),
            KVCacheTensor(3 * page, ("m",)),
        ),
        groups,
    )
    backend = replace(BACKENDS["FLASHINFER"], block_sizes=(MultipleOf(1),))
    tensors = allocate_kv_cache(
        config, {"a": backend}, "NHD", kernel_block_sizes=[views, 8]
    )
    assert tensors.kernel_block_sizes == (views, 8)

    def make(size: int) -> MetadataBuilder:
        shapes = [
            table_shape(spec, limits(MAX_LEN), size),
            table_shape(other, limits(MAX_LEN)),
        ]
        made = BlockTables(shapes, max_num_reqs=2, max_model_len=MAX_LEN)
        return MetadataBuilder(groups, made, 16, tensors)

    make(tensors.kernel_block_sizes[0])
    with pytest.raises(ConfigError) as raised:
        make(tables)
    for words in (
        f"group 0: its block table counts blocks of {tables} tokens",
        f"layer 'a' those of {views} (kernel_block_sizes of allocate_kv_cache)",
        "KVTensors.kernel_block_sizes",
    ):
        assert words in str(raised.value)


def test_buffers_stay_where_they_are() -> None:
    tables = naive.table_of(4)
    tables.append(0, [[3]])
    make = builder(tables, GROUPS[0])

    def step(computed: int) -> StepBatch:
        one: Any = np.array([1], np.int32)
        request = WorkerRequest("a", [0, 0], computed)
        return StepBatch((request,), one * computed, one, one * 0)

    first, second = (make.build(step(n)).groups[0] for n in (0, 1))
    for name in ("slots", "block_table"):
        assert getattr(first, name).data_ptr() == getattr(second, name).data_ptr()
    for name in ("query_start_loc", "seq_lens", "positions", "rows"):
        before, after = getattr(first.batch, name), getattr(second.batch, name)
        assert before.data_ptr() == after.data_ptr()
