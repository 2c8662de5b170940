"""Arrivals: requests that can never be served are refused before anything is kept."""

from kvplugin.errors import check_count
from kvplugin.manager import KVCacheManager
from kvplugin.request import RequestError
from kvplugin.scheduler.entry import Entry


def check_arrival(entry: Entry, manager: KVCacheManager, lookahead: int) -> None:
    """Refuse what would fail later.

    Args:
        entry: the request, in no queue yet.
        manager: the KV cache.
        lookahead: slots for a draft model beyond a step's tokens.

    Raises:
        RequestError: naming the request and what to change.
    """
    name = f"request {entry.id!r}"
    check_count(f"{name}: max_tokens", entry.max_tokens, 1, error=RequestError)
    encoder = entry.num_encoder_tokens
    check_count(f"{name}: num_encoder_tokens", encoder, 0, error=RequestError)
    wrong = _what_is_wrong(entry, manager)
    wrong = wrong or _what_does_not_fit(entry, manager, lookahead)
    if wrong:
        raise RequestError(f"{name} {wrong}")


def _what_is_wrong(entry: Entry, manager: KVCacheManager) -> str:
    request, block_size = entry.request, manager.hash_block_size
    # The counts are believed; steps in flight when it ended still change them.
    tokens = request.num_computed_tokens, request.num_in_flight_tokens
    if any(tokens) or request.num_preemptions:
        return "was served before: make a new Request"
    # Short prompts have no hashes yet: what counts is how they will be made.
    hashed = request.hash_format is not None and request.hash_block_size == block_size
    if manager.enable_caching and not hashed:
        return (
            f"is not hashed in blocks of {block_size} tokens, as the manager's: give "
            f"it a hash_format and hash_block_size={block_size}"
        )
    return ""


def _what_does_not_fit(entry: Entry, manager: KVCacheManager, lookahead: int) -> str:
    length, most = entry.request.num_tokens + entry.max_tokens, manager.max_model_len
    if length > most:
        return (
            f"has {entry.request.num_tokens} tokens and asks for max_tokens="
            f"{entry.max_tokens}, more than max_model_len={most}"
        )
    needed = manager.coordinator.get_num_blocks_to_allocate(
        entry.id,
        # The last token is not computed: its slot counts among those for drafts.
        min(length + max(lookahead - 1, 0), most),
        manager.empty_kv_cache_blocks.ids,
        entry.num_encoder_tokens,
        0,
        length,
        whole_request=True,
    )
    usable = manager.block_pool.num_usable_blocks
    if needed <= usable:
        return ""
    return (
        f"needs {needed} blocks for {length} tokens, the pool has {usable}: shorten "
        f"it, or give the cache more memory"
    )
