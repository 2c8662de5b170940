"""What can be hit in host memory is what its key says, on every rank."""

from collections.abc import Sequence
from typing import Any

from kvplugin.connectors.offload.chunks import Chunking, chunkings
from kvplugin.testing.rules import GroupModel, identity_of_request
from kvplugin.testing.slots import STATE_SLOT, BlockContent, ContentError, Slot
from tests.offload.hybrid_memory import HostMemory


def assert_host_content(lab: Any) -> int:
    """Of all requests there ever were, as they are hashed now.

    Args:
        lab: a `HybridLab`.

    Returns:
        Blocks verified, on all ranks.

    Raises:
        ContentError: one holds something else.
    """
    cuts = chunkings(lab.engine, lab.config.blocks_per_chunk)
    verified = 0
    for request in lab.requests.values():
        histories = identity_of_request(request).histories(request.all_token_ids)
        for cut in cuts:
            number = 0
            while (key := cut.key(request, number)) is not None:
                slot = lab.half._tier.slot_of(key)
                if slot is not None:
                    for host in lab.hosts:
                        _check(host, lab.memory.groups, cut, number, slot, histories)
                        verified += cut.blocks
                number += 1
    return verified


def _check(
    host: HostMemory,
    models: Sequence[GroupModel],
    cut: Chunking,
    number: int,
    slot: int,
    histories: Sequence[int],
) -> None:
    model = models[cut.index]
    for block in range(number * cut.blocks, (number + 1) * cut.blocks):
        place = host.place(cut.index, cut.host_block(slot, block))
        content = host.blocks.get(place)
        if content is None:
            raise ContentError(f"host block {place} can be hit and was never written")
        _check_block(model, block, content, histories)


def _check_block(
    model: GroupModel, block: int, content: BlockContent, histories: Sequence[int]
) -> None:
    first, end = block * model.block_size, (block + 1) * model.block_size
    for position in range(first, end) if model.keeps_tokens else (end - 1,):
        place = position - first if model.keeps_tokens else STATE_SLOT
        found = content.slots.get(place, content.fill)
        wanted = (model.index, position, histories[position])
        if not isinstance(found, Slot) or found[:3] != wanted:
            raise ContentError(
                f"in host memory group {model.index} has at position {position}: "
                f"{found}, not {wanted}"
            )
