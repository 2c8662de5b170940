"""Every engine carries rows where numpy's indexing of the caches says."""

import mmap
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplugin.errors import ConfigError
from kvplugin.kernels.host_convert import BlockConverter
from kvplugin.layout import HeadSlice, KVLayout, Part, plan_conversion
from tests.core.kv_caches import (
    BACKENDS,
    FUSED_BACKENDS,
    LATENT_BACKENDS,
    PACKED_BACKENDS,
    Cache,
    Sizes,
    after_copy,
)
from tests.kernels.host_helpers import check_leaves_the_gil, run_python


def check_convert(
    engine: str,
    source: Cache,
    target: Cache,
    ids: tuple[Sequence[int], Sequence[int]],
    num_tokens: int,
    heads: HeadSlice | None = None,
) -> None:
    """The target's rows are right, and every other byte is as it was."""
    conversion = plan_conversion(source.layout, target.layout, heads)
    chunks = conversion.pair_chunks(*ids, num_tokens)
    count = len(chunks[0]) * conversion.chunk_tokens
    expected = after_copy(source, target, ids, count, heads)
    source_before = source.buffer.copy()
    converter = BlockConverter(
        conversion, source.address, target.address, engine=engine
    )
    nbytes = converter.convert(*chunks)
    np.testing.assert_array_equal(target.buffer, expected)
    np.testing.assert_array_equal(source.buffer, source_before)
    assert converter.chunk_bytes == conversion.chunk_bytes
    assert nbytes == len(chunks[0]) * conversion.chunk_bytes


@st.composite
def hops(
    draw: st.DrawFn,
) -> tuple[Cache, Cache, tuple[list[int], list[int]], int, HeadSlice | None]:
    kind = draw(st.sampled_from(["equal", "fused", "latent", "packed"]))
    key = draw(st.integers(1, 9) | st.sampled_from([16, 32, 48, 64, 80]))
    value = draw(st.integers(1, 9)) if kind == "fused" else key
    backends = {
        "equal": [*BACKENDS, *FUSED_BACKENDS],
        "fused": list(FUSED_BACKENDS),
        "latent": list(LATENT_BACKENDS),
        "packed": list(PACKED_BACKENDS),
    }[kind]
    count = 1 if kind == "latent" else draw(st.integers(1, 4))
    sliced = kind != "latent" and draw(st.booleans())
    firsts = [draw(st.integers(0, 2)) if sliced else 0 for _ in range(2)]
    num_tokens = draw(st.integers(1, 40))
    dtype = draw(st.sampled_from(["uint8", "uint16", "uint32"]))
    made, rows = [], []
    for first in firsts:
        heads = first + count + (draw(st.integers(0, 2)) if sliced else 0)
        tokens = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 16]) | st.just(heads))
        needed = -(-num_tokens // tokens)
        blocks = needed + draw(st.integers(0, 2))
        rows.append(list(draw(st.permutations(range(blocks))))[:needed])
        made.append(
            Cache(
                draw(st.sampled_from(backends)),
                Sizes(heads, key, value, dtype),
                blocks,
                tokens,
                draw(st.integers(0, 3)),
                draw(st.sampled_from([0, 0, 16, 8, 1])),
            )
        )
    heads_slice = HeadSlice(*firsts, count) if sliced else None
    return made[0], made[1], (rows[0], rows[1]), num_tokens, heads_slice


@settings(max_examples=200, deadline=None)
@given(hop=hops())
def test_any_conversion(
    engine: str,
    hop: tuple[Cache, Cache, tuple[list[int], list[int]], int, HeadSlice | None],
) -> None:
    check_convert(engine, *hop)


# A store's width (16, 32, 64), less and more; 1 KiB: rows are streamed as runs.
@pytest.mark.parametrize(
    "row_bytes", [1, 15, 16, 24, 32, 48, 64, 65, 160, 192, 256, 1024, 1040, 70_000]
)
@pytest.mark.parametrize("source_shift", [0, 1])
@pytest.mark.parametrize("target_shift", [0, 32, 16, 1])
@pytest.mark.parametrize("to_heads", [True, False])
def test_rows_and_alignments(
    engine: str, row_bytes: int, source_shift: int, target_shift: int, to_heads: bool
) -> None:
    """As many heads as tokens."""
    backends = ["FlashInfer NHD", "FlashInfer HND"][:: 1 if to_heads else -1]
    sizes = Sizes(3, row_bytes, row_bytes, "uint8")
    source = Cache(backends[0], sizes, 3, 3, seed=1, shift=source_shift)
    target = Cache(backends[1], sizes, 3, 3, seed=2, shift=target_shift)
    check_convert(engine, source, target, ([2, 0], [0, 1]), 6)


@pytest.mark.parametrize("target", ["FlashAttention NHD", "FlashAttention HND"])
@pytest.mark.parametrize("tokens", [(16, 64), (64, 16), (48, 32), (16, 16)])
def test_blocks_of_other_sizes(
    engine: str, target: str, tokens: tuple[int, int]
) -> None:
    sizes = Sizes(2, 64, 64, "uint16")
    rows = [list(range(192 // n))[::-1] for n in tokens]
    made = [
        Cache(backend, sizes, len(row), n, seed=n)
        for backend, row, n in zip(
            ("FlashAttention HND", target), rows, tokens, strict=True
        )
    ]
    check_convert(engine, *made, (rows[0], rows[1]), 192)


@pytest.mark.parametrize("tokens", [(64, 128), (128, 64), (32, 128), (96, 64)])
@pytest.mark.parametrize("heads", [None, HeadSlice(1, 0, 2)])
def test_keys_transposed_over_their_blocks(
    engine: str, tokens: tuple[int, int], heads: HeadSlice | None
) -> None:
    """Pages of CPU attention: an element of all of a block's keys side by side."""
    rows = [list(range(384 // n))[::-1] for n in tokens]
    made = [
        Cache("CPU attention", Sizes(3, 16, 16, "uint16"), len(row), n, seed=n)
        for row, n in zip(rows, tokens, strict=True)
    ]
    check_convert(engine, *made, (rows[0], rows[1]), 384, heads)


def permuting(
    tokens: int = 4, blocks: int = 6, heads: int = 3, row: int = 64
) -> tuple[Cache, Cache]:
    sizes = Sizes(heads, row, row, "uint8")
    return (
        Cache("FlashInfer NHD", sizes, blocks, tokens, seed=1),
        Cache("FlashInfer HND", sizes, blocks, tokens, seed=2),
    )


def converter_of(engine: str, source: Cache, target: Cache) -> BlockConverter:
    conversion = plan_conversion(source.layout, target.layout)
    return BlockConverter(conversion, source.address, target.address, engine=engine)


def same_layout() -> tuple[Cache, Cache]:
    sizes = Sizes(2, 8, 8, "uint8")
    return (
        Cache("CPU", sizes, 6, 4, seed=1),
        Cache("FlashAttention HND", sizes, 6, 4, 2),
    )


def test_whole_runs_are_copied_as_runs() -> None:
    source, target = same_layout()
    assert plan_conversion(source.layout, target.layout).copies_whole_runs


@pytest.mark.parametrize("make", [permuting, same_layout])
@pytest.mark.parametrize(
    ("source_ids", "target_ids"),
    [
        pytest.param([3, 3, 3, 1], [4, 5, 0, 1], id="a source three times"),
        pytest.param([2, 3, 4, 5], [1, 2, 3, 4], id="one run"),
        pytest.param([5], [5], id="the last block"),
        pytest.param(np.array([1, 0], np.uint8), range(2, 4), id="other kinds of ids"),
    ],
)
def test_ids(
    engine: str,
    make: Callable[[], tuple[Cache, Cache]],
    source_ids: Sequence[int],
    target_ids: Sequence[int],
) -> None:
    source, target = make()
    ids = (list(source_ids), list(target_ids))
    expected = after_copy(source, target, ids, 4 * len(ids[0]))
    converter_of(engine, source, target).convert(source_ids, target_ids)
    np.testing.assert_array_equal(target.buffer, expected)


@pytest.mark.parametrize("make", [permuting, same_layout])
@pytest.mark.parametrize("ids", [[], (), np.empty(0, np.int64)])
def test_no_chunks(
    engine: str, make: Callable[[], tuple[Cache, Cache]], ids: Sequence[int]
) -> None:
    source, target = make()
    before = target.buffer.copy()
    assert converter_of(engine, source, target).convert(ids, ids) == 0
    np.testing.assert_array_equal(target.buffer, before)


@pytest.mark.parametrize("make", [permuting, same_layout])
@pytest.mark.parametrize(
    ("source_chunks", "target_chunks", "message"),
    [
        ([0, 1], [0], "2 source ids do not pair with 1 target ids"),
        ([6], [0], "source id 6 is out of range: there are 6 chunks, 0 to 5"),
        ([0, -1], [0, 1], "source id -1 is out of range"),
        ([0], [7], "target id 7 is out of range: there are 6 chunks, 0 to 5"),
        ([0, 1, 2], [5, 1, 5], "target id 5 appears more than once"),
        ([[0]], [[0]], r"source ids must be a flat list .* shape \(1, 1\)"),
        ([0], [0.5], "target ids must be a flat list of integers, not float64"),
    ],
)
def test_bad_ids_change_nothing(
    engine: str,
    make: Callable[[], tuple[Cache, Cache]],
    source_chunks: Sequence[int],
    target_chunks: Sequence[int],
    message: str,
) -> None:
    source, target = make()
    before = target.buffer.copy()
    converter = converter_of(engine, source, target)
    with pytest.raises(ValueError, match=message):
        converter.convert(source_chunks, target_chunks)
    np.testing.assert_array_equal(target.buffer, before)


def test_ids_count_chunks_not_blocks() -> None:
    sizes = Sizes(2, 8, 8, "uint8")
    source, target = Cache("CPU", sizes, 3, 8), Cache("CPU", sizes, 2, 16, seed=1)
    converter = converter_of("auto", source, target)
    assert converter.convert([2], [3]) == converter.chunk_bytes
    with pytest.raises(ValueError, match=r"source id 3 .*: there are 3 chunks, 0 to 2"):
        converter.convert([3], [0])
    with pytest.raises(ValueError, match=r"target id 4 .*: there are 4 chunks, 0 to 3"):
        converter.convert([0], [4])


@pytest.mark.parametrize(
    ("addresses", "message"),
    [
        ((0, 4096), "source_address 0 is not positive"),
        ((4096, -1), "target_address -1 is not positive"),
    ],
)
def test_bad_addresses(addresses: tuple[int, int], message: str) -> None:
    layout = permuting()[0].layout
    with pytest.raises(ValueError, match=message):
        BlockConverter(plan_conversion(layout, layout), *addresses)


def test_more_chunks_than_ids() -> None:
    one = KVLayout((Part("kv", 0, 1 << 10, 8, 8, 8),), 1 << 25, 128, 1)
    other = KVLayout((Part("kv", 0, 8, 8, 8, 8),), 1 << 32, 1, 1)
    with pytest.raises(ValueError, match="chunks are more than 2147483648"):
        BlockConverter(plan_conversion(one, other), 4096, 4096)


@pytest.mark.parametrize("make", [permuting, same_layout])
def test_unknown_engine(make: Callable[[], tuple[Cache, Cache]]) -> None:
    with pytest.raises(ConfigError, match=r"unknown copy engine 'numbas'.*'numba'"):
        converter_of("numbas", *make())


def test_a_single_block_of_any_stride(engine: str) -> None:
    """numpy gives an axis of one any stride."""
    memory = np.arange(256, dtype=np.uint8)
    target = np.zeros(256, np.uint8)
    layout = KVLayout((Part("kv", 0, 0, 8, 8, 8),), 1, 32, 1)
    conversion = plan_conversion(layout, layout)
    assert conversion.copies_whole_runs
    addresses = memory.ctypes.data, target.ctypes.data
    BlockConverter(conversion, *addresses, engine=engine).convert([0], [0])
    np.testing.assert_array_equal(memory, target)


def test_offsets_beyond_two_gib(engine: str, tmp_path: Path) -> None:
    """Blocks, chunks and rows that are a GiB apart."""
    with (tmp_path / "sparse").open("w+b") as file:
        file.truncate(7 << 30)
        sparse = mmap.mmap(file.fileno(), 0)
    memory = np.frombuffer(sparse, np.uint8)
    gib = 1 << 30
    far = KVLayout((Part("kv", 0, gib, 3 * gib, 96, 96),), 3, 2, 4)
    near = KVLayout((Part("kv", 0, 768, 96, 192, 96),), 3, 2, 4)
    noise = np.random.default_rng(0).integers(0, 256, 3 * 768, dtype=np.uint8)
    back = np.zeros_like(noise)
    there = plan_conversion(near, far)
    here = plan_conversion(far, near)
    assert not there.copies_whole_runs
    to, from_ = (noise.ctypes.data, memory.ctypes.data), back.ctypes.data
    BlockConverter(there, *to, engine=engine).convert([0, 1, 2], [2, 1, 0])
    BlockConverter(here, to[1], from_, engine=engine).convert([2, 1, 0], [0, 1, 2])
    np.testing.assert_array_equal(back, noise)
    rows = noise.reshape(3, 4, 2, 96)
    for block, token, head in np.ndindex(3, 2, 4):
        at = (2 - block + 3 * token) * gib + 96 * head
        np.testing.assert_array_equal(memory[at : at + 96], rows[block, head, token])


def test_conversions_leave_the_gil(engine: str, progress: Callable[[], int]) -> None:
    source, target = permuting(tokens=16, blocks=2000, heads=8, row=256)
    converter = converter_of(engine, source, target)
    ids = np.random.default_rng(0).permutation(2000)
    check_leaves_the_gil(
        lambda: converter.convert(ids, ids[::-1]), source.buffer, progress
    )


def test_conversions_in_two_threads(engine: str) -> None:
    source, target = permuting(tokens=16, blocks=64)
    ids = ([*range(64)], [*range(64)][::-1])
    expected = after_copy(source, target, ids, 16 * 64)
    converter = converter_of(engine, source, target)
    halves = np.random.default_rng(3).permutation(64).reshape(2, 32)

    def convert_half(chunks: np.ndarray) -> None:
        for _ in range(20):
            converter.convert(chunks, 63 - chunks)

    threads = [threading.Thread(target=convert_half, args=(half,)) for half in halves]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(target.buffer, expected)


def test_importing_the_converter_imports_neither_torch_nor_numba() -> None:
    code = """
import sys, kvplugin.kernels.host_convert
assert not {"torch", "numba"} & set(sys.modules)
"""
    assert run_python(code) == ""
