"""vLLM's BlockPool with an eviction policy behind it.

Of vLLM's only the free queue is replaced. Every other call goes to vLLM's own method,
and the queue is told what became of keys. The same code serves vLLM 0.19 and 0.32.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvplugin.integration.vllm.block_hashes import hashes_of
from kvplugin.integration.vllm.policy_queue import PolicyQueue
from kvplugin.policies.eviction import NO_CONTEXT, EvictionPolicy, context_of

_Base: Any = object


class PolicyPoolMixin(_Base):
    """Stands before vLLM's `BlockPool` in a class made by `policy_pool`; as vLLM's own
    until `rank_by` is called."""

    blocks: list[Any]
    free_block_queue: Any
    hash_block_size: int
    kvp: PolicyQueue | None = None
    """The free queue, once a policy ranks it."""
    admitting: Any = None
    """Request that is admitted for the first time right now: its touches are hits."""

    def rank_by(self, make_policy: Callable[[int], EvictionPolicy]) -> PolicyQueue:
        """Put a policy behind the free queue of a pool that holds no key yet.

        Args:
            make_policy: from the number of blocks, the null block included.

        Returns:
            The free queue from now on.
        """
        queue = self.free_block_queue
        free = [block.block_id for block in queue.popleft_n(queue.num_free_blocks)]
        policy = make_policy(len(self.blocks))
        self.kvp = self.free_block_queue = PolicyQueue(self.blocks, free, policy)
        return self.kvp

    def cache_full_blocks(
        self,
        request: Any,
        blocks: Sequence[Any],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().cache_full_blocks(
            request,
            blocks,
            num_cached_blocks,
            num_full_blocks,
            block_size,
            kv_cache_group_id,
            *args,
            **kwargs,
        )
        run = blocks[num_cached_blocks:num_full_blocks]
        if run and self.kvp is not None and self.kvp.hears_inserts:
            self._report_keys(self.kvp, request, run, num_cached_blocks, block_size)

    def cache_partial_block(
        self,
        request: Any,
        block: Any,
        num_tokens: int,
        kv_cache_group_id: int,
        block_size: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        key = super().cache_partial_block(
            request, block, num_tokens, kv_cache_group_id, block_size, *args, **kwargs
        )
        if self.kvp is not None and self.kvp.hears_inserts:
            index = (num_tokens - 1) // block_size
            self._report_keys(self.kvp, request, [block], index, block_size)
        return key

    def move_block_hashes(self, src_block: Any, dst_block: Any) -> None:
        kvp = self.kvp
        super().move_block_hashes(src_block, dst_block)
        if kvp is not None and kvp.hears_inserts:
            source, target = src_block.block_id, dst_block.block_id
            kvp.notes.copy_place(source, target)
            kvp.forget([source])
            kvp.insert([target], NO_CONTEXT)

    def touch(self, blocks: Sequence[Any]) -> None:
        super().touch(blocks)
        if (kvp := self.kvp) is None:
            return
        kvp.settle()
        if self.admitting is not None:
            keyed = [b.block_id for b in blocks if b._block_hash is not None]
            kvp.hit(keyed, context_of(self.admitting))

    def unpin_blocks(self, blocks: Iterable[Any], *args: Any, **kwargs: Any) -> None:
        if self.kvp is None:
            super().unpin_blocks(blocks, *args, **kwargs)
            return
        self.kvp.unpinning = True
        try:
            super().unpin_blocks(blocks, *args, **kwargs)
        finally:
            self.kvp.unpinning = False

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        if self.kvp is not None:
            inside = range(len(self.blocks))
            self.kvp.forget([block for block in block_ids if block in inside])
        super().evict_blocks(block_ids)

    def reset_prefix_cache(self) -> bool:
        done: bool = super().reset_prefix_cache()
        if done and self.kvp is not None:
            self.kvp.forget_all()
        return done

    def _report_keys(
        self,
        kvp: PolicyQueue,
        request: Any,
        blocks: Sequence[Any],
        depth: int,
        block_size: int,
    ) -> None:
        """Tell which of these have a key now.

        Args:
            kvp: the free queue.
            request: whose consecutive blocks they are.
            blocks: some may be null or have no key.
            depth: index of the first one in the request.
            block_size: tokens of a block.
        """
        keyed = [b.block_id for b in blocks if b._block_hash is not None]
        if kvp.wants_info:
            whole = len(keyed) == len(blocks)
            ids = keyed if whole else [block.block_id for block in blocks]
            hashes = hashes_of(request, self.hash_block_size, block_size)
            parents = [hashes[depth - 1] if depth else None]
            parents += hashes[depth : depth + len(ids) - 1]
            kvp.notes.place(ids, parents, depth)
        kvp.insert(keyed, context_of(request))


def policy_pool(base: type) -> type:
    """A subclass of vLLM's `BlockPool` that a policy can rank."""
    return type("PolicyBlockPool", (PolicyPoolMixin, base), {})
