"""BlockPool: the life of physical blocks, whatever memory they stand for.

A block is in one of four states, and only the pool moves it:

    free, no key ──get_new_blocks──> in use, no key ──insert──> in use, keyed
         ▲  ▲                              │                        │    ▲
         │  └─────────free_blocks──────────┘              free_blocks    touch
         └──get_new_blocks takes a victim, evict_blocks──  free, keyed ──┘

Free blocks without a key are used first, those freed last before others; among keyed
ones the eviction policy chooses. The pool trusts a policy with that choice and with
nothing else: one that raises or answers something impossible is replaced by LRU, and
no block is lost. Data lives in flat lists indexed by block id.
"""

import logging
from collections.abc import Callable, Iterable, Sequence

from kvplugin.errors import CapacityError, IntegrityError
from kvplugin.events import (
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    external_hash,
)
from kvplugin.hashing import split_key
from kvplugin.policies.eviction import (
    LRU,
    NO_CONTEXT,
    BlockContext,
    BlockInfo,
    EvictionPolicy,
)

logger = logging.getLogger("vllm.kvplugin.block_pool")

NULL_BLOCK = 0
"""Id of the placeholder block: never free, never keyed, never counted."""


class BlockPool:
    """Blocks 0..num_blocks-1, of which block 0 is the null block.

    Args:
        num_blocks: number of ids, the null block included; at least 2.
        policy: ranks keyed free blocks; LRU if not given.
        block_size: tokens of a block, for events.
        enable_events: collect KV events for `take_events`.
        medium: what the blocks stand for, for events.

    Raises:
        CapacityError: fewer than two blocks.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        policy: EvictionPolicy | None = None,
        block_size: int = 0,
        enable_events: bool = False,
        medium: str = MEDIUM_GPU,
    ) -> None:
        if num_blocks < 2:
            raise CapacityError(
                f"a pool needs at least 2 blocks (one is the null block), "
                f"got {num_blocks}"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.medium = medium
        self.policy_failures = 0
        self._refs = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._parents: list[bytes | None] = [None] * num_blocks
        self._depths = [0] * num_blocks
        # The order of last releases, kept so that a policy that fails can be
        # replaced by LRU without losing recency.
        self._released_at = [0] * num_blocks
        self._releases = 0
        self._index: dict[bytes, int | dict[int, None]] = {}
        self._num_keyed = 0
        self._num_evictable = 0
        # Popped from the end: low ids first in a new pool.
        self._unkeyed = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._events: list[KVCacheEvent] | None = [] if enable_events else None
        self._policy: EvictionPolicy = LRU() if policy is None else policy
        self._policy.bind(num_blocks, self.info)

    # -- questions -----------------------------------------------------------------

    def get_num_free_blocks(self) -> int:
        """Blocks that `get_new_blocks` could hand out now."""
        return len(self._unkeyed) + self._num_evictable

    @property
    def num_used_blocks(self) -> int:
        """Blocks that somebody references."""
        return self.num_blocks - 1 - self.get_num_free_blocks()

    @property
    def num_keyed_blocks(self) -> int:
        """Blocks that carry a key, in use or not."""
        return self._num_keyed

    @property
    def usage(self) -> float:
        """Share of the blocks in use, 0 to 1."""
        return self.num_used_blocks / (self.num_blocks - 1)

    def info(self, block: int) -> BlockInfo:
        """Key and place of a keyed block.

        Raises:
            IntegrityError: the block carries no key.
        """
        key = self._keys[block]
        if key is None:
            raise IntegrityError(f"block {block} carries no key")
        return BlockInfo(
            key, self._parents[block], split_key(key)[1], self._depths[block]
        )

    def ref_count(self, block: int) -> int:
        """References to `block`; without meaning for the null block."""
        return self._refs[block]

    def get(self, key: bytes) -> int | None:
        """A block under `key` (the first inserted, if several), or None."""
        entry = self._index.get(key)
        if entry is None or isinstance(entry, int):
            return entry
        return next(iter(entry))

    # -- life of a block -----------------------------------------------------------

    def get_new_blocks(self, n: int) -> list[int]:
        """Take `n` free blocks: unkeyed ones first, then the policy's victims.

        Each comes with one reference and no key. All or nothing.

        Raises:
            CapacityError: fewer than `n` blocks are free; nothing has changed.
        """
        if n > self.get_num_free_blocks():
            raise CapacityError(
                f"{n} blocks wanted, {self.get_num_free_blocks()} of "
                f"{self.num_blocks - 1} free"
            )
        unkeyed = min(n, len(self._unkeyed))
        taken = [self._unkeyed.pop() for _ in range(unkeyed)]
        if n > unkeyed:
            victims = self._choose_victims(n - unkeyed)
            self._drop_keys(victims)
            self._num_evictable -= len(victims)
            taken += victims
        refs = self._refs
        for block in taken:
            refs[block] = 1
        return taken

    def insert(
        self,
        ids: Sequence[int],
        keys: Sequence[bytes],
        *,
        parent: bytes | None = None,
        depth: int = 0,
        ctx: BlockContext = NO_CONTEXT,
        token_ids: Sequence[int] = (),
    ) -> None:
        """Give a run of blocks in use their keys; from now on they can be hit.

        Args:
            ids: blocks in use without a key, consecutive blocks of one request.
            keys: one key a block, all of one group.
            parent: key of the block before `ids[0]`, None at the start.
            depth: index of `ids[0]` in its request.
            ctx: who inserts, for the policy.
            token_ids: their tokens, for events (may stay empty).

        Raises:
            IntegrityError: a block is null, free, has a key or is listed twice, or
                there is not one key a block; nothing has changed.
        """
        if not len(set(ids)) == len(ids) == len(keys):
            raise IntegrityError(f"blocks {ids} cannot be given {len(keys)} keys")
        for block in ids:
            if not self._refs[block] or self._keys[block] or block == NULL_BLOCK:
                raise IntegrityError(f"block {block} cannot be given a key")
        before = parent
        for i, (block, key) in enumerate(zip(ids, keys, strict=True)):
            self._keys[block] = key
            self._parents[block] = before
            self._depths[block] = depth + i
            self._add_to_index(key, block)
            before = key
        self._num_keyed += len(ids)
        if ids:
            self._tell(self._policy.insert, ids, ctx)
            self._tell_stored(keys, parent, token_ids)

    def touch(self, ids: Iterable[int]) -> None:
        """Add one reference to each block; keyed free blocks come into use.

        Raises:
            IntegrityError: a block is free and has no key (its content is nobody's);
                nothing has changed.
        """
        refs = self._refs
        ids = list(ids)
        for block in ids:
            if not refs[block] and self._keys[block] is None and block != NULL_BLOCK:
                raise IntegrityError(f"block {block} is free and has no key")
        pinned = []
        for block in ids:
            if refs[block] == 0 and block != NULL_BLOCK:
                pinned.append(block)
            refs[block] += 1
        if pinned:
            self._num_evictable -= len(pinned)
            self._tell(self._policy.pin, pinned)

    def adopt(self, ids: Sequence[int], ctx: BlockContext = NO_CONTEXT) -> None:
        """`touch` by a request that will read the blocks: the policy hears a hit."""
        self.touch(ids)
        keyed = [block for block in ids if self._keys[block] is not None]
        if keyed:
            self._tell(self._policy.hit, keyed, ctx)

    def free_blocks(self, ids: Iterable[int]) -> None:
        """Drop one reference of each block; list what should be evicted first, first
        (the tail of a request before its head). Null blocks are skipped.

        Raises:
            IntegrityError: a block has no reference left to drop; nothing has changed.
        """
        refs = self._refs
        ids = [block for block in ids if block != NULL_BLOCK]
        idle = []
        for done, block in enumerate(ids):
            if refs[block] <= 0:
                for undone in ids[:done]:
                    refs[undone] += 1
                raise IntegrityError(f"block {block} is freed once too often")
            refs[block] -= 1
            if refs[block] == 0:
                idle.append(block)
        self._unkeyed += [b for b in reversed(idle) if self._keys[b] is None]
        released = [b for b in idle if self._keys[b] is not None]
        for block in released:
            self._releases += 1
            self._released_at[block] = self._releases
        if released:
            self._num_evictable += len(released)
            self._tell(self._policy.release, released)

    def evict_blocks(self, ids: Iterable[int]) -> None:
        """Take the keys of blocks away; those in use stay in use. Key-less ids are
        skipped.

        Raises:
            IntegrityError: an id is outside the pool.
        """
        keyed = []
        for block in dict.fromkeys(ids):
            if not 0 <= block < self.num_blocks:
                raise IntegrityError(
                    f"block {block} is outside the pool of {self.num_blocks}"
                )
            if self._keys[block] is not None:
                keyed.append(block)
        if not keyed:
            return
        self._forget(keyed)
        self._drop_keys(keyed)
        idle = [block for block in keyed if not self._refs[block]]
        self._num_evictable -= len(idle)
        self._unkeyed += idle

    def drop_all_keys(self) -> None:
        """Forget every key at once; blocks in use stay in use without one."""
        keyed = [b for b, key in enumerate(self._keys) if key is not None]
        if keyed:
            self._forget(keyed)
        for block in keyed:
            self._keys[block] = self._parents[block] = None
            if not self._refs[block]:
                self._unkeyed.append(block)
        self._index.clear()
        self._num_keyed = self._num_evictable = 0
        if self._events is not None:
            self._events.append(AllBlocksCleared())

    def reset_prefix_cache(self) -> bool:
        """Forget every key if no block is in use.

        Returns:
            False, with nothing changed, while blocks are in use.
        """
        if self.num_used_blocks:
            logger.warning(
                "prefix cache not reset: %d blocks are in use", self.num_used_blocks
            )
            return False
        self.drop_all_keys()
        return True

    def take_events(self) -> list[KVCacheEvent]:
        """Events since the last call, oldest first; empty when not enabled."""
        if not self._events:
            return []
        events, self._events = self._events, []
        return events

    # -- integrity -----------------------------------------------------------------

    def check(self) -> None:
        """Verify every invariant of the pool, in O(num_blocks).

        Raises:
            IntegrityError: naming the first invariant that does not hold.
        """
        free = [b for b in range(1, self.num_blocks) if self._refs[b] == 0]
        self._require(all(ref >= 0 for ref in self._refs[1:]), "negative references")
        self._require(
            sorted(self._unkeyed) == [b for b in free if self._keys[b] is None],
            "the stack of key-less blocks differs from the free blocks without key",
        )
        self._require(
            sorted(self._policy.order()) == [b for b in free if self._keys[b]],
            "the policy's evictable set differs from the free keyed blocks",
        )
        self._require(
            len(list(self._policy.order())) == len(self._policy) == self._num_evictable,
            "the policy's order, its length and the pool's count disagree",
        )
        indexed = {
            block: key
            for key, entry in self._index.items()
            for block in ([entry] if isinstance(entry, int) else entry)
        }
        keyed = {b: key for b, key in enumerate(self._keys) if key is not None}
        self._require(indexed == keyed, "the index differs from the blocks' keys")
        self._require(self._num_keyed == len(keyed), "keyed blocks are miscounted")
        self._policy.check()

    @staticmethod
    def _require(holds: bool, what: str) -> None:
        if not holds:
            raise IntegrityError(what)

    # -- inside --------------------------------------------------------------------

    def _tell(self, call: Callable[..., None], *args: object) -> None:
        """Tell the policy what has happened; LRU learns it from the pool's lists."""
        try:
            call(*args)
        except Exception:
            self._fall_back_to_lru()

    def _forget(self, ids: Sequence[int]) -> None:
        """Tell the policy of keys that are about to go, while `info` still has them."""
        try:
            self._policy.forget(ids)
        except Exception:
            self._fall_back_to_lru()
            self._policy.forget(ids)

    def _choose_victims(self, n: int) -> list[int]:
        try:
            victims = self._policy.victims(n)
            self._verify_victims(victims, n)
        except Exception:
            self._fall_back_to_lru()
            victims = self._policy.victims(n)
        return victims

    def _verify_victims(self, victims: Sequence[int], n: int) -> None:
        if len(victims) != n or len(set(victims)) != n:
            raise IntegrityError(f"{n} distinct victims wanted, got {victims}")
        for block in victims:
            if not 0 < block < self.num_blocks or self._refs[block]:
                raise IntegrityError(f"victim {block} is not a free block")
            if self._keys[block] is None:
                raise IntegrityError(f"victim {block} carries no key")

    def _fall_back_to_lru(self) -> None:
        """A policy that fails is replaced for the pool's life; nothing is lost."""
        logger.exception(
            "eviction policy %s failed and is replaced by LRU",
            type(self._policy).__name__,
        )
        self.policy_failures += 1
        evictable = [
            b
            for b in range(1, self.num_blocks)
            if self._keys[b] is not None and not self._refs[b]
        ]
        evictable.sort(key=self._released_at.__getitem__)
        self._policy = LRU()
        self._policy.bind(self.num_blocks, self.info)
        self._policy.release(evictable)

    def _add_to_index(self, key: bytes, block: int) -> None:
        entry = self._index.setdefault(key, block)
        if isinstance(entry, dict):
            entry[block] = None
        elif entry != block:
            self._index[key] = {entry: None, block: None}

    def _drop_keys(self, ids: Iterable[int]) -> None:
        """Take blocks out of the index; the policy already knows."""
        for block in ids:
            key = self._keys[block]
            if key is None:
                raise IntegrityError(f"block {block} carries no key")
            self._keys[block] = self._parents[block] = None
            self._num_keyed -= 1
            entry = self._index[key]
            if isinstance(entry, dict):
                del entry[block]
                if len(entry) == 1:
                    self._index[key] = next(iter(entry))
                continue
            del self._index[key]
            if self._events is not None:
                block_hash, group = split_key(key)
                self._events.append(
                    BlockRemoved([external_hash(block_hash)], self.medium, group)
                )

    def _tell_stored(
        self, keys: Sequence[bytes], parent: bytes | None, token_ids: Sequence[int]
    ) -> None:
        if self._events is None:
            return
        self._events.append(
            BlockStored(
                block_hashes=[external_hash(split_key(key)[0]) for key in keys],
                parent_block_hash=_external(parent),
                token_ids=list(token_ids),
                block_size=self.block_size,
                lora_id=None,
                medium=self.medium,
                lora_name=None,
                group_idx=split_key(keys[0])[1],
            )
        )


def _external(key: bytes | None) -> int | None:
    return None if key is None else external_hash(split_key(key)[0])
