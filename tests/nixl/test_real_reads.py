"""Reads between real processes, over NIXL and by the kernel: every byte is right."""

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvplugin.connectors.nixl.messages import GroupRead
from kvplugin.contract import GroupKind
from tests.nixl.peer_process import PeerProcess
from tests.nixl.ranks import GroupSpec, RankSpec, order, peer_of
from tests.nixl.reading import (
    WAYS,
    assert_pages_equal,
    assert_rows_equal,
    consumer,
    end_of,
    ends_of,
    read_threads,
)

pytest.importorskip("nixl")

NUM_BLOCKS = 4200

FULL = GroupSpec(layers=2, block_size=16, order="NHD")
PRODUCER = RankSpec(
    "producer",
    (
        FULL,
        GroupSpec(GroupKind.SLIDING_WINDOW, layers=1, window=40, order="opaque"),
        GroupSpec(GroupKind.MAMBA, layers=2, block_size=16, order="state"),
    ),
    num_blocks=NUM_BLOCKS,
)


@pytest.fixture(scope="module")
def producer() -> Iterator[PeerProcess]:
    with closing(PeerProcess(PRODUCER)) as peer:
        yield peer


def blocks(count: int, kind: str, seed: int) -> list[int]:
    """Ids of a row."""
    if kind == "contiguous":
        return list(range(7, 7 + count))
    return random.Random(seed).sample(range(1, NUM_BLOCKS), count)


@pytest.mark.parametrize("same_host", WAYS)
@pytest.mark.parametrize("ours", ["contiguous", "fragmented"])
@pytest.mark.parametrize("theirs", ["contiguous", "fragmented"])
def test_one_block_and_four_thousand(
    producer: PeerProcess, same_host: str, theirs: str, ours: str
) -> None:
    rank = consumer(PRODUCER, same_host)
    with closing(rank.worker):
        rank.step(peers=[producer.peer])
        for number, count in enumerate((1, 2, 333, 4000)):
            part = GroupRead(
                0, 0, count * 16, blocks(count, theirs, 1), blocks(count, ours, 2)
            )
            for memory in rank.memory.values():
                memory[:] = 0
            rank.step(reads=[order(number, producer.peer, [part])])
            end = end_of(rank, number)
            assert (end.error, end.discarded) == ("", False)
            assert end.nbytes == 2 * count * FULL.page_bytes
            assert_pages_equal(rank, producer.memory, part)
            untouched = np.setdiff1d(np.arange(NUM_BLOCKS), part.local_ids)
            assert not rank.memory["0.0"][untouched].any()
    assert not read_threads()


@pytest.mark.parametrize("same_host", WAYS)
@pytest.mark.parametrize("is_shared", [False, True])
def test_every_group_at_once(
    producer: PeerProcess, same_host: str, is_shared: bool
) -> None:
    """A prefix of one group, the tail of another, one state of the third; layers of
    ours may lie over each other, as vLLM's do."""
    parts = [
        GroupRead(0, 32, 100, [3, 4, 9, 11, 12], [20, 22, 21, 23, 24]),
        GroupRead(1, 60, 100, [13, 14, 15, 19], [30, 31, 32, 40]),
        GroupRead(2, 99, 100, [25], [50]),
    ]
    rank = consumer(replace(PRODUCER, is_shared=is_shared), same_host)
    rank.step(peers=[producer.peer], reads=[order(1, producer.peer, parts)])
    assert end_of(rank, 1).error == ""
    for part in parts:
        assert_pages_equal(rank, producer.memory, part)
    rank.worker.close()


@pytest.mark.parametrize("same_host", WAYS)
@pytest.mark.parametrize(
    ("layout", "size"), [("NHD", 32), ("NHD", 8), ("HND", 16), ("HND", 32)]
)
def test_other_layouts_and_block_sizes(
    producer: PeerProcess, same_host: str, layout: str, size: int
) -> None:
    """Rows are converted through staging that holds a few blocks at a time."""
    group = replace(FULL, order=layout, block_size=size)
    spec = replace(PRODUCER, groups=(group, *PRODUCER.groups[1:]))
    rank = consumer(replace(spec, config={"staging_bytes": 1 << 16}), same_host)
    rank.step(peers=[producer.peer])
    for number, (first, end) in enumerate([(0, 640), (96, 1000), (0, 7)]):
        theirs = blocks(-(-end // 16) - first // 16, "fragmented", number)
        ours = blocks(-(-end // size) - first // size, "fragmented", number + 9)
        part = GroupRead(0, first, end, theirs, ours)
        rank.step(reads=[order(number, producer.peer, [part])])
        assert end_of(rank, number).error == ""
        assert_rows_equal(rank, PRODUCER, producer.memory, part)
    assert rank.worker._memory is not None
    assert len(rank.worker._memory.staging._free) == 4
    rank.worker.close()


@pytest.mark.parametrize("same_host", WAYS)
def test_heads_of_two_ranks(same_host: str) -> None:
    """Two producer ranks hold a head each; both arrays of generations count."""
    half = replace(FULL, heads=1, total_heads=2, layers=1)
    specs = [
        RankSpec("split", (half,), 64, rank=rank, tp_size=2, seed=rank + 1)
        for rank in (0, 1)
    ]
    ranks = [PeerProcess(spec) for spec in specs]
    peer = peer_of(specs[0], [rank.introduction for rank in ranks])
    whole = replace(FULL, order="HND", layers=1)
    rank = consumer(RankSpec("reader", (whole,), 64), same_host)
    part = GroupRead(0, 0, 48, [3, 9, 5], [8, 2, 1])
    try:
        rank.step(peers=[peer], reads=[order(1, peer, [part])])
        assert end_of(rank, 1).error == ""
        assert _rows_by_head(rank.memory["0.0"], part.local_ids, whole) == [
            row
            for head_rows in zip(
                *(_rows_by_head(p.memory["0.0"], part.remote_ids, half) for p in ranks),
                strict=True,
            )
            for row in head_rows
        ]
        ranks[1].step(generations=[(9, 4)])
        rank.step(reads=[order(2, peer, [part])])
        end = end_of(rank, 2)
        assert end.discarded
        assert "block 9 is in generation 4, not 0" in end.error
    finally:
        rank.worker.close()
        for process in ranks:
            process.close()


def _rows_by_head(
    memory: "np.ndarray[Any, Any]", ids: Sequence[int], group: GroupSpec
) -> list[bytes]:
    layout = group.tensor(len(memory))[1]
    assert layout is not None
    flat = memory.reshape(-1)
    starts = [
        (layout.row(part, block, token, head), rows.row_bytes)
        for part, rows in enumerate(layout.parts)
        for block in ids
        for token in range(group.block_size)
        for head in range(group.heads)
    ]
    return [flat[start : start + size].tobytes() for start, size in starts]


@pytest.mark.full
@pytest.mark.parametrize("same_host", WAYS)
def test_what_a_busy_interpreter_notices(
    producer: PeerProcess, same_host: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prints the longest pauses of a thread that never leaves the interpreter, alone
    and beside reads, and how long these take then. Of a shared machine nothing can be
    asserted."""
    rank = consumer(PRODUCER, same_host)
    part = GroupRead(
        0, 0, 64000, blocks(4000, "fragmented", 1), blocks(4000, "contiguous", 2)
    )
    rank.step(peers=[producer.peer], reads=[order(0, producer.peer, [part])])
    assert end_of(rank, 0).error == ""

    def pauses(seconds: float) -> list[float]:
        found, last = [], time.perf_counter()
        end = last + seconds
        while last < end:
            now = time.perf_counter()
            found.append(now - last)
            last = now
        return sorted(found)[-3:]

    alone = pauses(0.5)
    rank.step(reads=[order(n, producer.peer, [part]) for n in range(1, 9)])
    beside = pauses(0.5)
    took = [end.seconds for end in ends_of(rank, range(1, 9))]
    with capsys.disabled():
        print(  # noqa: T201
            f"\nsame_host {same_host}: longest pauses alone "
            f"{[round(p * 1e3, 1) for p in alone]} ms, beside reads "
            f"{[round(p * 1e3, 1) for p in beside]} ms; reads of "
            f"{4000 * FULL.page_bytes * 2 / 2**20:.0f} MiB took "
            f"{[round(t * 1e3, 1) for t in took]} ms"
        )
    rank.worker.close()
