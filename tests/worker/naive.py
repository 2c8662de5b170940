"""What the worker should know, said one token at a time."""

from collections.abc import Sequence

from kvplugin.spec import EngineLimits, FullAttentionSpec, KVCacheSpec, MambaSpec
from kvplugin.worker.block_table import BlockTables
from kvplugin.worker.context_parallel import ContextParallel
from kvplugin.worker.table_shape import TableShape


def full(block_size: int) -> KVCacheSpec:
    return FullAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=8, dtype="bfloat16"
    )


def state(block_size: int, drafts: int = 0) -> KVCacheSpec:
    return MambaSpec(
        block_size=block_size,
        shapes=((4,),),
        dtypes=("float32",),
        num_speculative_blocks=drafts,
    )


def limits(max_model_len: int, **others: int) -> EngineLimits:
    return EngineLimits(max_model_len=max_model_len, **others)


def table_of(
    block_size: int,
    max_model_len: int = 32,
    *,
    ratio: int = 1,
    max_num_reqs: int = 4,
    groups: int = 1,
    place: ContextParallel = ContextParallel(),  # noqa: B008
) -> BlockTables:
    """Equal groups of sharded full attention."""
    shape = TableShape(
        block_size=block_size,
        width=-(max_model_len // -(block_size * place.ranks)),
        kernel_block_size=block_size // ratio,
        is_sharded=True,
        ranks=place.ranks,
    )
    return BlockTables(
        [shape] * groups,
        max_num_reqs=max_num_reqs,
        max_model_len=max_model_len,
        context_parallel=place,
    )


def kernel_blocks(ids: Sequence[int], ratio: int) -> list[int]:
    return [block * ratio + part for block in ids for part in range(ratio)]


def slot(
    ids: Sequence[int],
    position: int,
    block_size: int,
    place: ContextParallel = ContextParallel(),  # noqa: B008
) -> int:
    """By the manager's blocks, as the specification has it."""
    block, offset = divmod(position, block_size * place.ranks)
    if offset // place.interleave % place.ranks != place.rank:
        return -1
    rounds = offset // (place.interleave * place.ranks)
    local = rounds * place.interleave + offset % place.interleave
    return ids[block] * block_size + local
