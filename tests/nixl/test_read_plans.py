"""Plans of reads have few descriptors, stage what pays, and refuse wrong orders."""

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from kvplugin.connectors.negotiate import Pairing, pair_rank
from kvplugin.connectors.nixl.descriptor import LayerMemory
from kvplugin.connectors.nixl.messages import GroupRead
from kvplugin.connectors.nixl.reads import Batch, ReadPlanner
from kvplugin.contract import GroupKind
from kvplugin.errors import ConfigError, IntegrityError
from kvplugin.layout import Run
from tests.nixl.memories import Engine, Layer, Side
from tests.nixl.read_oracle import check_read, order

PAGE = 16 << 10
HOME, AWAY, STAGING = 1 << 40, 1 << 41, 1 << 42
"""Addresses that nobody touches."""


def memory(address: int, runs: Sequence[Run], page: int = PAGE) -> LayerMemory:
    return LayerMemory(
        name="layer",
        group=0,
        address=address,
        device="cpu",
        page_bytes=page,
        runs=list(runs),
        dtype="bfloat16",
        interior="same",
        total_heads=0,
        rows=None,
        state=[],
    )


def pages(
    remote: int, local: int, *runs: tuple[Run, Run], page: int = PAGE, rank: int = 0
) -> Pairing:
    """A layer whose pages are alike."""
    return Pairing(
        group=0,
        layer="layer",
        remote_rank=rank,
        source=memory(AWAY + remote, [pair[0] for pair in runs], page),
        target=memory(HOME + local, [pair[1] for pair in runs], page),
        conversion=None,
        source_blocks=1 << 20,
        target_blocks=1 << 20,
    )


def simple(page: int = PAGE) -> Pairing:
    run = Run(0, page, page)
    return pages(0, 0, (run, run), page=page)


def planned(
    pairings: Sequence[Pairing],
    remote: Sequence[int],
    local: Sequence[int],
    staging: int = 1 << 26,
    **options: bool,
) -> list[Batch]:
    planner = ReadPlanner(pairings, STAGING, staging, **options)
    return planner.plan(order(GroupRead(0, 0, 1, list(remote), list(local))))


def descriptors(batches: Sequence[Batch]) -> list[tuple[int, int, int]]:
    """(remote, local, bytes), from the beginnings of both memories."""
    return [
        (there - AWAY, here - HOME, nbytes)
        for batch in batches
        for transfer in batch.transfers
        for there, here, nbytes in zip(
            transfer.remote.tolist(),
            transfer.local.tolist(),
            transfer.nbytes.tolist(),
            strict=True,
        )
    ]


@pytest.mark.parametrize("step", [1, -1])
def test_neighbours_are_one(step: int) -> None:
    """In the order of the pool, or in that of a free list, which is mostly reversed."""
    found = planned([simple()], range(5, 25)[::step], range(40, 60)[::step])
    assert descriptors(found) == [(5 * PAGE, 40 * PAGE, 20 * PAGE)]


def test_neighbours_on_one_side_only_are_not() -> None:
    found = planned([simple(1 << 16)], [5, 6, 7], [9, 8, 10])
    size = 1 << 16
    assert descriptors(found) == [
        (5 * size, 9 * size, size),
        (6 * size, 8 * size, size),
        (7 * size, 10 * size, size),
    ]


def test_keys_and_values_apart_are_two() -> None:
    half, far = PAGE // 2, 1 << 30
    keys, values = Run(0, half, half), Run(far, half, half)
    found = planned([pages(0, 0, (keys, keys), (values, values))], [2, 1], [6, 5])
    assert descriptors(found) == [
        (half, 5 * half, 2 * half),
        (far + half, far + 5 * half, 2 * half),
    ]


def test_layers_that_lie_together_are_one() -> None:
    """All layers of a block beside each other, on both sides."""
    run = Run(0, 4 * PAGE, PAGE)
    layers = [pages(i * PAGE, i * PAGE, (run, run)) for i in (2, 0, 3, 1)]
    found = planned(layers, [3, 8], [5, 6])
    size = 4 * PAGE
    assert descriptors(found) == [
        (3 * size, 5 * size, size),
        (8 * size, 6 * size, size),
    ]


def test_ranks_and_devices_are_apart() -> None:
    one, two = simple(), replace(simple(), remote_rank=1)
    (batch,) = planned([one, two], [3], [4])
    assert [t.remote_rank for t in batch.transfers] == [0, 1]
    assert [len(t.remote) for t in batch.transfers] == [1, 1]


def test_small_pages_that_only_the_peer_has_together_are_staged() -> None:
    remote, local = range(10, 74), [3 * i for i in range(1, 65)]
    (batch,) = planned([simple()], remote, local)
    (transfer,) = batch.transfers
    assert transfer.remote.tolist() == [AWAY + 10 * PAGE]
    assert transfer.local.tolist() == [STAGING]
    assert transfer.nbytes.tolist() == [64 * PAGE]
    (work,) = batch.conversions
    assert work.source_chunks.tolist() == list(range(64))
    assert work.target_chunks.tolist() == local


@pytest.mark.parametrize(
    ("page", "remote", "options"),
    [
        pytest.param(1 << 16, range(10, 74), {}, id="large pages"),
        pytest.param(PAGE, range(10, 138, 2), {}, id="nobody has them together"),
        pytest.param(PAGE, range(10, 74), {"stage_pages": False}, id="unwanted"),
        pytest.param(PAGE, range(10, 74), {"staging": PAGE}, id="no room"),
    ],
)
def test_other_pages_go_where_they_belong(
    page: int, remote: range, options: dict[str, int]
) -> None:
    (batch,) = planned([simple(page)], remote, [3 * i for i in range(1, 65)], **options)  # type: ignore[arg-type]
    assert not batch.conversions
    assert len(batch.transfers[0].remote) == 64


def converted(
    source: str, target: str, sizes: tuple[int, int], **changes: int
) -> tuple[Pairing, ...]:
    """Pairings of our rank 0, of blocks of these sizes."""
    heads, tp = (
        changes.get("heads", 8),
        (changes.get("there", 1), changes.get("here", 1)),
    )
    sides = []
    for backend, size, ranks in zip((source, target), sizes, tp, strict=True):
        layers = [Layer(f"{i}", 0, heads, 64, 64) for i in range(2)]
        side = Side({layer.name: backend for layer in layers}, [size], [1], 20, ranks)
        sides.append(Engine(layers, side, [GroupKind.FULL]))
    there, here = sides
    return pair_rank(here.descriptor(), here.rank(0), there.descriptor())


def test_only_our_heads_are_read() -> None:
    """Two of eight heads: a quarter of the keys and of the values, which are read
    apart where much lies between them."""
    for tokens, rest in ((128, 0), (16, 6)):
        pairings = converted("FlashInfer HND", "FlashInfer NHD", (tokens, 16), here=4)
        planner = ReadPlanner(pairings, STAGING, 1 << 26)
        rows = [[*range(3, 3 + 128 // size)] for size in (tokens, 16)]
        (batch,) = planner.plan(order(GroupRead(0, 0, 128, *rows)))
        (transfer,) = batch.transfers
        assert transfer.nbytes.sum() == 2 * (2 + rest + 2) * 128 * 64 * 2


def test_transposed_keys_are_staged_in_slices_of_heads() -> None:
    pairings = converted("CPU attention", "CPU attention", (64, 128), here=2)
    planner = ReadPlanner(pairings, STAGING, 1 << 26)
    (batch,) = planner.plan(order(GroupRead(0, 0, 256, [3, 4, 5, 6], [2, 1])))
    (transfer,) = batch.transfers
    half = 4 * 2 * 64 * 64 * 2
    assert transfer.nbytes.tolist() == [half] * 8
    assert len(batch.conversions) == 2
    assert batch.conversions[1].source_chunks.tolist() == [4, 5, 6, 7]
    assert batch.conversions[1].target_chunks.tolist() == [4, 5, 2, 3]


def test_large_runs_are_not_staged() -> None:
    """Blocks of whole tokens: four of ours make one of theirs, in order."""
    pairings = converted("fused LBNHC", "fused LBNHC", (64, 16))
    planner = ReadPlanner(pairings, STAGING, 1 << 26)
    (batch,) = planner.plan(order(GroupRead(0, 0, 128, [7, 8], [*range(4, 12)])))
    assert not batch.conversions
    assert batch.transfers[0].nbytes.tolist() == [128 * 8 * 128 * 2] * 2


def test_large_runs_are_not_staged_wherever_they_go() -> None:
    pairings = converted("fused LBNHC", "fused LBNHC", (128, 64))
    planner = ReadPlanner(pairings, STAGING, 1 << 26)
    (batch,) = planner.plan(order(GroupRead(0, 0, 256, [7, 8], [9, 3, 5, 1])))
    assert not batch.conversions
    assert batch.transfers[0].nbytes.tolist() == [64 * 8 * 128 * 2] * 8


def test_layers_of_other_sizes_do_not_share_staging() -> None:
    """A slot of one is not a slot of the other: the next batch is theirs, whatever the
    order of the layers."""
    sides = []
    for backend in ("CPU attention, all layers", "CPU attention"):
        layers = [Layer(f"{i}", 0, 4, k, k) for i, k in enumerate((16, 2) * 2)]
        side = Side(dict.fromkeys("0123", backend), [16 << len(sides)], [1], 9)
        sides.append(Engine(layers, side, [GroupKind.FULL]))
    there, here = sides
    there.fill()
    pairings = pair_rank(here.descriptor(), here.rank(0), there.descriptor())
    staging = np.zeros(1 << 16, np.uint8)
    planner = ReadPlanner(pairings, staging.ctypes.data, len(staging))
    read = GroupRead(0, 0, 64, [3, 1, 2, 5], [4, 7])
    assert len(planner.plan(order(read))) == 2
    check_read(there, here, 0, planner, [read], staging)


def test_batches_fit_the_staging_memory() -> None:
    pairings = converted("FlashInfer HND", "FlashInfer NHD", (16, 16))
    block = 2 * 8 * 16 * 64 * 2
    planner = ReadPlanner(pairings, STAGING, 3 * block + 64)
    batches = planner.plan(order(GroupRead(0, 0, 112, [*range(1, 8)], [*range(1, 8)])))
    assert [len(batch.conversions) for batch in batches] == [1, 1, 2, 1, 1]
    for batch in batches:
        (transfer,) = batch.transfers
        assert transfer.local.min() >= STAGING
        assert (transfer.local + transfer.nbytes).max() <= STAGING + 3 * block
        assert transfer.nbytes.sum() <= 3 * block
    with pytest.raises(
        ConfigError, match=rf"staging_bytes={block - 1} .* layer '0' needs {block}"
    ):
        ReadPlanner(pairings, STAGING, block - 1)


# -- orders that are wrong -------------------------------------------------------------


def test_null_blocks_of_ours_are_left_out() -> None:
    found = planned([simple()], [0, 7, 8], [0, 3, 4])
    assert descriptors(found) == [(7 * PAGE, 3 * PAGE, 2 * PAGE)]
    assert planned([simple()], [0, 5], [0, 0]) == []


@pytest.mark.parametrize(
    ("remote", "local", "message"),
    [
        ([0, 1], [3, 4], "0 is not one of the peer's blocks, 1 to 1048575"),
        ([1, 1 << 20], [3, 4], "1048576 is not one of the peer's blocks"),
        ([1, -1], [3, 4], "-1 is not one of the peer's blocks"),
        ([1, 2], [3, -4], "-4 is not one of our blocks"),
        ([1, 2], [1 << 20, 4], "1048576 is not one of our blocks"),
        ([1, 2], [3], "2 blocks of the peer for 1"),
        ([1, 2], [3, 3], "3 is named twice"),
    ],
)
def test_rows_that_are_wrong(remote: list[int], local: list[int], message: str) -> None:
    with pytest.raises(IntegrityError, match=message):
        planned([simple()], remote, local)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ((0, 33), "2 blocks of 16 tokens do not hold tokens 0 to 33"),
        ((8, 33), "2 blocks of 16 tokens do not hold tokens 8 to 33"),
        ((-1, 16), "tokens -1 to 16"),
        ((16, 8), "tokens 16 to 8"),
    ],
)
def test_tokens_that_rows_do_not_hold(tokens: tuple[int, int], message: str) -> None:
    pairings = converted("FlashInfer HND", "FlashInfer NHD", (16, 64))
    planner = ReadPlanner(pairings, STAGING, 1 << 26)
    with pytest.raises(IntegrityError, match=message):
        planner.plan(order(GroupRead(0, *tokens, [1, 2], [1])))


def test_groups_of_other_ranks() -> None:
    planner = ReadPlanner([simple()], STAGING, 1 << 26)
    assert planner.plan(order(GroupRead(1, 0, 16, [1], [1]))) == []
    assert planner.plan(order()) == []


def test_plans_are_made_in_no_time() -> None:
    """Not asserted, only shown: 10,000 blocks of 32 layers."""
    ids = np.random.default_rng(0).permutation(np.arange(1, 20_001))[:10_000].tolist()
    run = Run(0, PAGE, PAGE)
    layers = [pages(i << 30, i << 30, (run, run)) for i in range(32)]
    planner = ReadPlanner(layers, STAGING, 1 << 26)
    for name, remote, local in (
        ("neighbours", [*range(1, 10_001)], [*range(1, 10_001)]),
        ("fragmented", [*range(2, 20_002, 2)], ids),
        ("staged", [*range(1, 10_001)], ids),
    ):
        read = order(GroupRead(0, 0, 1, remote, local))
        started = time.perf_counter()
        batches = planner.plan(read)
        seconds = time.perf_counter() - started
        count = sum(len(t.remote) for batch in batches for t in batch.transfers)
        line = f"{name}: {seconds * 1e3:.1f} ms, {len(batches)} batches, {count} reads"
        print(line)  # noqa: T201 - for people who look
        assert count == {"neighbours": 32, "fragmented": 320_000}.get(name, count)
