"""What tests do with a manager again and again."""

from kvplugin.kv_cache_blocks import KVCacheBlocks
from kvplugin.manager import KVCacheManager
from kvplugin.request import Request


def compute(
    kv: KVCacheManager,
    request: Request,
    budget: int = 1 << 30,
    upto: int | None = None,
    *,
    lookup: bool = True,
) -> bool:
    """Compute a request's tokens in steps of at most `budget`, from its hit on if it
    was not admitted before.

    Returns:
        False if blocks ran out on the way.
    """
    blocks: KVCacheBlocks | None = None
    hit = 0
    if lookup and not request.num_computed_tokens:
        blocks, hit = kv.get_computed_blocks(request)
    stop = request.num_tokens if upto is None else upto
    while request.num_computed_tokens + hit < stop:
        kv.new_step_starts()
        n = min(stop - hit - request.num_computed_tokens, budget)
        if kv.allocate_slots(request, n, hit, blocks) is None:
            return False
        request.num_computed_tokens += hit + n
        blocks, hit = None, 0
        kv.check()
    return True


def cache(kv: KVCacheManager, request: Request, budget: int = 1 << 30) -> Request:
    """Compute a request and let it end."""
    assert compute(kv, request, budget)
    kv.free(request)
    kv.new_step_starts()
    return request


def evict(kv: KVCacheManager, request: Request, keep: set[int], group: int = 0) -> None:
    """Take the keys of all blocks of a prompt but those at the places in `keep`."""
    manager = kv.coordinator.single_type_managers[group]
    for i, block_hash in enumerate(manager.coarse_hashes(request.block_hashes)):
        found = kv.block_pool.get_cached_block(block_hash, [group])
        if i not in keep and found:
            kv.evict_blocks(found)
