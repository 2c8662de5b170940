"""Does one request of full length fit, and if not, how long may it be?

After vLLM 0.19.1 `v1/core/kv_cache_utils.py`. With `vllm019_arithmetic` off
blocks that no request can have do not count as room: the null block (as in 0.32) and
those of sinks.
"""

from collections.abc import Sequence
from dataclasses import replace

from kvplugin.errors import CapacityError, ConfigError
from kvplugin.groups.config import GroupingConfig
from kvplugin.spec import EngineLimits, KVCacheGroupSpec

GIB = 1 << 30

_ADVICE = (
    "See https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more "
    "details."
)


def bytes_per_block(groups: Sequence[KVCacheGroupSpec]) -> int:
    """Bytes of one block in the worker that has these groups.

    Blocks of all groups come from one pool, so the group with most layers decides; 0
    if no group has a layer here.
    """
    return max((group.bytes_per_block for group in groups), default=0)


def blocks_per_request(groups: Sequence[KVCacheGroupSpec], limits: EngineLimits) -> int:
    """Most blocks that a request of `max_model_len` tokens holds at one time."""
    return sum(group.kv_cache_spec.max_blocks_per_request(limits) for group in groups)


def reserved_blocks(groups: Sequence[KVCacheGroupSpec], limits: EngineLimits) -> int:
    """Blocks of the pool that no request can have: the null block and sinks."""
    if limits.vllm019_arithmetic:
        return 0
    return 1 + sum(group.kv_cache_spec.reserved_blocks for group in groups)


def max_memory_usage_bytes(
    groups: Sequence[KVCacheGroupSpec], limits: EngineLimits
) -> int:
    """Bytes of `blocks_per_request` in the worker that has these groups."""
    return bytes_per_block(groups) * blocks_per_request(groups, limits)


def usable_bytes(
    groups: Sequence[KVCacheGroupSpec], config: GroupingConfig, available_memory: int
) -> int:
    """Bytes that requests can have out of `available_memory`.

    Raises:
        ConfigError: `available_memory` is not an integer.
    """
    check_available_memory(available_memory)
    block = bytes_per_block(groups)
    if config.vllm019_arithmetic or not block:
        return available_memory
    if config.num_gpu_blocks_override is not None:
        available_memory = config.num_gpu_blocks_override * block
    return available_memory - block * reserved_blocks(groups, config)


def check_available_memory(available_memory: int) -> None:
    """Check that it is a number of bytes.

    Less than nothing is a number: engines find it where weights leave no room, and the
    check for one request then says what to do.

    Raises:
        ConfigError: it is not an integer.
    """
    if not isinstance(available_memory, int) or isinstance(available_memory, bool):
        raise ConfigError(
            f"available_memory must be an integer, in bytes, not {available_memory!r}"
        )


def estimate_max_model_len(
    groups: Sequence[KVCacheGroupSpec], limits: EngineLimits, usable_memory: int
) -> int:
    """Largest length up to `max_model_len` of which one request fits; 0 if none does.

    By bisection: a longer request never holds fewer blocks.

    Args:
        groups: the worker's groups.
        limits: all but the length is kept.
        usable_memory: bytes, see `usable_bytes`.
    """
    fits, too_long = 0, limits.max_model_len + 1
    while too_long - fits > 1:
        length = (fits + too_long) // 2
        shorter = replace(limits, max_model_len=length)
        if max_memory_usage_bytes(groups, shorter) <= usable_memory:
            fits = length
        else:
            too_long = length
    return fits


def check_enough_memory(
    groups: Sequence[KVCacheGroupSpec], limits: EngineLimits, usable_memory: int
) -> None:
    """Check that one request of `max_model_len` tokens fits.

    Raises:
        CapacityError: it does not; the message says what is needed, what there is,
            which length would fit, and which setting gives more room.
    """
    if not bytes_per_block(groups):
        return
    if usable_memory <= 0:
        raise CapacityError(
            "No available memory for the cache blocks. Try increasing "
            f"{_room(limits)} when initializing the engine. {_ADVICE}"
        )
    needed = max_memory_usage_bytes(groups, limits)
    if needed <= usable_memory:
        return
    longest = estimate_max_model_len(groups, limits, usable_memory)
    estimate = (
        "Based on the available memory, the estimated maximum model length is "
        f"{longest}. "
        if longest
        else ""
    )
    raise CapacityError(
        "To serve at least one request with the models's max seq len "
        f"({limits.max_model_len}), ({_gib(needed)} GiB KV cache is needed, which is "
        "larger than the available KV cache memory "
        f"({_gib(usable_memory)} GiB). {estimate}Try increasing "
        f"{_room(limits)} or decreasing `max_model_len` when initializing the "
        f"engine. {_ADVICE}"
    )


def auto_fit_max_model_len(
    workers: Sequence[tuple[Sequence[KVCacheGroupSpec], int]], limits: EngineLimits
) -> int:
    """Largest length up to `max_model_len` of which one request fits on every worker.

    Args:
        workers: groups and usable bytes (`usable_bytes`) of each.
        limits: all but the length is kept.

    Raises:
        CapacityError: not even one token fits on some worker.
    """
    longest = min(
        (
            estimate_max_model_len(groups, limits, usable)
            for groups, usable in workers
            if bytes_per_block(groups)
        ),
        default=limits.max_model_len,
    )
    if longest <= 0:
        raise CapacityError(
            "Cannot auto-fit max_model_len: not enough GPU memory available to serve "
            f"even a single token. Try increasing {_room(limits)}."
        )
    return longest


def uniform_page_size(groups: Sequence[KVCacheGroupSpec]) -> int:
    """The page size of all groups, in bytes; at least one group.

    Raises:
        ConfigError: there are several.
    """
    pages = {group.kv_cache_spec.page_size_bytes for group in groups}
    if len(pages) != 1:
        raise ConfigError(
            f"KV cache groups have several page sizes: {sorted(pages)} bytes"
        )
    return pages.pop()


def _room(limits: EngineLimits) -> str:
    """The setting that decides how many blocks the checks find."""
    override = getattr(limits, "num_gpu_blocks_override", None)
    if override is None or limits.vllm019_arithmetic:
        return "`gpu_memory_utilization`"
    return f"`num_gpu_blocks_override` ({override})"


def _gib(count: int) -> str:
    """GiB as in vLLM's message; more digits where two would show nothing."""
    return f"{round(count / GIB, 2) or round(count / GIB, 9)}"
