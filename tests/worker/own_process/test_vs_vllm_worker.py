"""The worker's arithmetic beside vLLM 0.32's, where that runs on a CPU."""

import importlib
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplugin.errors import ConfigError
from kvplugin.kernels.dispatch import slot_mappings
from kvplugin.kernels.host_slots import SlotTable, SlotTables
from kvplugin.worker.context_parallel import ContextParallel
from kvplugin.worker.drafts import (
    draft_tokens,
    group_queries,
    next_drafts,
    num_rejected_tokens,
    ungroup_queries,
)
from kvplugin.worker.kernel_blocks import MultipleOf, select_kernel_block_size
from kvplugin.worker.step_tokens import step_tokens
from tests.worker.naive import table_of

ROWS, BLOCK, MAX_LEN = 4, 16, 128
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def _kernels_for_cpus() -> None:
    """vLLM's Triton kernels are replaced by what it has for CPUs."""
    pytest.importorskip("vllm")
    # First of all: vLLM's modules import each other in an order that has to be.
    platform = importlib.import_module("vllm.platforms").current_platform
    for module in ("v1.spec_decode.utils", "v1.worker.block_table", "v1.worker.utils"):
        vllm(module)
    platform.register_triton_kernel_overrides()


def vllm(module: str) -> ModuleType:
    return importlib.import_module(f"vllm.{module}")


def int32(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def starts_of(lengths: Sequence[int]) -> torch.Tensor:
    return int32([0, *lengths]).cumsum(0).to(torch.int32)


def their_table(width: int) -> Any:
    return vllm("v1.worker.block_table").BlockTable(
        block_size=BLOCK,
        max_num_reqs=ROWS,
        max_num_blocks_per_req=width,
        max_num_batched_tokens=512,
        pin_memory=False,
        device=CPU,
        cp_kv_cache_interleave_size=1,
    )


rows = st.integers(0, ROWS - 1)
ids = st.lists(st.integers(1, 99), max_size=2)
changes = st.one_of(
    st.tuples(st.just("append"), rows, ids),
    st.tuples(st.just("overwrite"), rows, ids),
    st.tuples(st.just("move"), rows, rows),
    st.tuples(st.just("swap"), rows, rows),
    st.tuples(st.just("clear"), rows, st.none()),
)


def change(ours: Any, theirs: Any, name: str, row: int, what: Any) -> None:
    if name == "append":
        ours.append(row, [what])
        theirs.append_row(what, row)
    elif name == "overwrite":
        ours.overwrite(row, [what])
        theirs.add_row(what, row)
    elif name == "clear":
        ours.clear(row)
        theirs.clear_row(row)
    elif name == "swap":
        ours.swap(row, what)
        theirs.swap_row(row, what)
    elif row != what:
        ours.move(row, what)
        theirs.move_row(row, what)


@settings(max_examples=60, deadline=None)
@given(st.lists(changes, max_size=12), st.lists(st.integers(0, 20), min_size=ROWS))
def test_tables_and_slots(
    steps: list[tuple[str, int, Any]], scheduled: list[int]
) -> None:
    """Of what rows have; behind it vLLM keeps what was there before."""
    ours = table_of(BLOCK, BLOCK * 24, max_num_reqs=ROWS)
    theirs = their_table(24)
    for step in steps:
        change(ours, theirs, *step)
    lengths = []
    for row in range(ROWS):
        mine = ours.tables[0].row(row)
        assert len(mine) == theirs.num_blocks_per_row[row]
        assert mine == theirs.block_table.np[row, : len(mine)].tolist()
        lengths.append(min(scheduled[row], len(mine) * BLOCK))
    computed = [
        len(ours.tables[0].row(row)) * BLOCK - length
        for row, length in enumerate(lengths)
    ]
    tokens = step_tokens(int32(computed).numpy(), int32(lengths).numpy())
    positions = torch.from_numpy(tokens.positions)
    ours.commit(ROWS)
    theirs.commit_block_table(ROWS)
    theirs.compute_slot_mapping(ROWS, torch.from_numpy(tokens.starts), positions)
    out = torch.empty(1, len(positions), dtype=torch.int64)
    slot_mappings(ours.slot_tables(), torch.from_numpy(tokens.rows), positions, out)
    assert torch.equal(out[0], theirs.slot_mapping.gpu[: len(positions)])


sizes = st.lists(
    st.sampled_from([8, 16, 32, 48, 64])
    | st.sampled_from([1, 8, 16, 24, 32]).map(MultipleOf),
    min_size=1,
    max_size=3,
)


@settings(deadline=None)
@given(
    st.sampled_from([16, 24, 32, 64, 96, 128, 256]),
    st.dictionaries(st.sampled_from("ABC"), sizes, min_size=1),
)
def test_kernel_block_sizes(
    block_size: int, supported: dict[str, list[int | MultipleOf]]
) -> None:
    multiple_of = vllm("v1.attention.backend").MultipleOf

    def backend(name: str) -> Any:
        translated = [
            multiple_of(size.base) if isinstance(size, MultipleOf) else size
            for size in supported[name]
        ]
        return SimpleNamespace(
            get_name=lambda: name,
            get_supported_kernel_block_sizes=lambda _: translated,
        )

    backends = [backend(name) for name in supported]
    select = vllm("v1.worker.utils").select_common_block_size
    try:
        theirs = select(block_size, backends)
    except ValueError:
        with pytest.raises(ConfigError):
            select_kernel_block_size(block_size, supported)
    else:
        assert select_kernel_block_size(block_size, supported) == theirs


@settings(deadline=None)
@given(st.lists(st.integers(0, 300)), st.integers(1, 8), st.integers(1, 8), st.data())
def test_local_lengths(
    lengths: list[int], ranks: int, interleave: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, ranks - 1))
    place = ContextParallel(ranks=ranks, rank=rank, interleave=interleave)
    local = vllm("v1.attention.backends.utils").get_dcp_local_seq_lens
    theirs = local(int32(lengths), ranks, rank, interleave)
    assert torch.equal(place.local_lengths(int32(lengths)), theirs)


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(1, 5))
def test_queries_by_request(requests: int, tokens: int) -> None:
    utils = vllm("v1.attention.backends.utils")
    query = torch.rand(requests * tokens, 2, 3)
    theirs = utils.reshape_query_for_spec_decode(query, requests)
    ours = group_queries(query, [tokens] * requests)
    assert torch.equal(ours, theirs)
    back = utils.reshape_attn_output_for_spec_decode(theirs)
    assert torch.equal(ungroup_queries(ours), back)


def some_table(seed: int, requests: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    width = MAX_LEN // BLOCK
    blocks = torch.randint(1, 999, (requests, width), generator=generator)
    return blocks.to(torch.int32)


def slots_of(
    blocks: torch.Tensor, token_rows: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    out = torch.empty(1, len(positions), dtype=torch.int64)
    tables = SlotTables([SlotTable(blocks, BLOCK)], max_model_len=MAX_LEN)
    slot_mappings(tables, token_rows, positions, out)
    return out[0]


verified = st.tuples(
    st.integers(0, MAX_LEN - 6), st.integers(1, 6), st.integers(0, 5)
).map(lambda v: (v[0], v[1], min(v[2], v[1] - 1)))


@settings(deadline=None)
@given(st.lists(verified, min_size=1, max_size=4), st.integers(0, 4))
def test_slots_of_drafts(step: list[tuple[int, int, int]], num_new: int) -> None:
    computed, lengths, rejected = map(list, zip(*step, strict=True))
    starts, blocks = starts_of(lengths), some_table(len(step), len(step))
    tokens = draft_tokens(
        starts, int32(computed), int32(rejected), sum(lengths), num_new
    )
    common = SimpleNamespace(
        block_table_tensor=blocks,
        query_start_loc=starts,
        naive_query_lens=starts.diff,
    )
    theirs = vllm("v1.spec_decode.utils").compute_new_slot_mapping(
        common, tokens.positions, tokens.is_rejected, BLOCK, num_new, MAX_LEN
    )
    assert torch.equal(slots_of(blocks, tokens.rows, tokens.positions), theirs)


@settings(deadline=None)
@given(st.lists(st.integers(0, MAX_LEN - 1), min_size=1, max_size=6))
def test_the_next_draft(positions: list[int]) -> None:
    at, lengths = torch.tensor(positions), int32(positions) + 1
    blocks = some_table(0, len(positions))
    clamped, slots = torch.empty_like(at), torch.empty_like(at)
    seq_lens = lengths.clone()
    utils = vllm("v1.spec_decode.utils")
    utils.eagle_step_update_slot_mapping_and_metadata(
        at, blocks, seq_lens, BLOCK, MAX_LEN, clamped, slots
    )
    ours = next_drafts(at, lengths, MAX_LEN)
    assert torch.equal(ours.positions, clamped)
    assert torch.equal(ours.seq_lens, seq_lens)
    assert torch.equal(slots_of(blocks, ours.rows, ours.positions), slots)


sampled = st.tuples(st.integers(0, 5), st.integers(1, 6), st.integers(1, 3)).map(
    lambda v: (v[0], min(v[1], v[0] + 1), v[2])
)


@settings(deadline=None)
@given(st.lists(sampled, min_size=1, max_size=6))
def test_rejections(step: list[tuple[int, int, int]]) -> None:
    drafts, valid, others = map(list, zip(*step, strict=True))
    lengths = [d + o for d, o in zip(drafts, others, strict=True)]
    starts = starts_of(lengths)
    last, rejected = int32([0] * len(step)), int32([0] * len(step))
    utils = vllm("v1.spec_decode.utils")
    utils._eagle_prepare_inputs_padded(
        int32(drafts).cumsum(0).to(torch.int32),
        int32(valid),
        starts,
        last,
        rejected,
        len(step),
    )
    ours = num_rejected_tokens(int32(drafts), int32(valid))
    assert torch.equal(ours, rejected)
    tokens = draft_tokens(starts, int32([0] * len(step)), ours, sum(lengths))
    assert torch.equal(tokens.last.to(torch.int32), last)
