"""What a plan of reads must do, token by token."""

from collections.abc import Sequence

import numpy as np

from kvplugin.connectors.nixl.messages import GroupRead, ReadOrder
from kvplugin.connectors.nixl.reads import ReadPlanner
from tests.nixl.memories import (
    Engine,
    Layer,
    Memory,
    StateCache,
    allow_blocks,
    execute,
    held,
)


def order(*parts: GroupRead) -> ReadOrder:
    return ReadOrder(1, "request", "peer", list(parts), [])


def check_read(
    there: Engine,
    here: Engine,
    rank: int,
    planner: ReadPlanner,
    reads: Sequence[GroupRead],
    staging: np.ndarray,
) -> int:
    """Carry out a plan for one of our ranks; how many batches it was."""
    source, reader = there.descriptor(), here.descriptor()
    remote = {}
    for i, peer in enumerate(source.ranks):
        remote[i] = Memory(there.buffers(i))
        allow_blocks(remote[i], peer, reads, ours=False)
    local = Memory([*here.buffers(rank), staging])
    local.allow(staging.ctypes.data, len(staging))
    allow_blocks(local, reader.ranks[rank], reads, ours=True)
    kept = [[buffer.copy() for buffer in there.buffers(i)] for i in remote]
    batches = planner.plan(order(*reads))
    for transfer in execute(planner, batches, remote, local):
        assert transfer.remote_device == transfer.local_device == "cpu"
        for array in (transfer.remote, transfer.local, transfer.nbytes):
            assert array.dtype == np.int64
    for i, copies in enumerate(kept):
        for buffer, copy in zip(there.buffers(i), copies, strict=True):
            np.testing.assert_array_equal(buffer, copy)
    for layer in here.layers:
        if layer.name in here.caches[rank]:
            check_layer(there, here, rank, layer, reads[layer.group])
    return len(batches)


def check_layer(
    there: Engine, here: Engine, rank: int, layer: Layer, read: GroupRead
) -> None:
    """Every token of the order, one by one."""
    peers = [i for i, caches in enumerate(there.caches) if layer.name in caches]
    if layer.state:
        check_state(there, here, rank, layer, (read.remote_ids[0], read.local_ids[0]))
        return
    sizes = [side.block_sizes[read.group] for side in (there.side, here.side)]
    heads = held(layer.heads, here.side.tp, rank % here.side.tp)
    for token in range(read.first_token, read.end_token):
        blocks = [
            ids[token // size - read.first_token // size]
            for ids, size in zip((read.remote_ids, read.local_ids), sizes, strict=True)
        ]
        mine = here.token(layer, rank, blocks[1], token % sizes[1])
        for place, head in enumerate(heads):
            peer = next(
                i
                for i in peers
                if head in held(layer.heads, there.side.tp, i % there.side.tp)
            )
            owned = held(layer.heads, there.side.tp, peer % there.side.tp)
            theirs = there.token(layer, peer, blocks[0], token % sizes[0])
            for one, other in zip(mine, theirs, strict=True):
                np.testing.assert_array_equal(
                    one[place], other[owned.index(head)], err_msg=f"{layer} {token}"
                )


def check_state(
    there: Engine, here: Engine, rank: int, layer: Layer, blocks: tuple[int, int]
) -> None:
    """Every row of ours, one by one."""
    mine = here.caches[rank][layer.name]
    assert isinstance(mine, StateCache)
    for i, part in enumerate(mine.parts):
        for place, row in enumerate(held(part.total_rows, here.side.tp, rank)):
            peer = next(
                peer
                for peer in range(there.side.tp)
                if row in held(part.total_rows, there.side.tp, peer)
            )
            owned = held(part.total_rows, there.side.tp, peer)
            stage = next(i for i, c in enumerate(there.caches) if layer.name in c)
            theirs = there.caches[stage + peer][layer.name]
            assert isinstance(theirs, StateCache)
            np.testing.assert_array_equal(
                mine.rows(part)[blocks[1], :, place],
                theirs.rows(theirs.parts[i])[blocks[0], :, owned.index(row)],
                err_msg=f"{part} {row}",
            )
