"""BlockPool: the life of physical blocks, whatever memory they stand for.

A block is in one of four states, and only the pool moves it:

    free, no key ──get_new_blocks──> in use, no key ──insert──> in use, keyed
         ▲  ▲                              │                        │    ▲
         │  └─────────free_blocks──────────┘              free_blocks    touch
         └──get_new_blocks takes a victim, evict_blocks──  free, keyed ──┘

Free blocks without a key are used first, those freed last before others; among keyed
ones the eviction policy chooses, and is trusted with nothing else (`ranking.py`). Data
lives in flat lists indexed by block id (`block_keys.py` for keys).
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from kvplugin.block import NULL_BLOCK, KVCacheBlock
from kvplugin.block_keys import BlockKeys
from kvplugin.errors import CapacityError, IntegrityError
from kvplugin.events import (
    MEDIUM_GPU,
    AllBlocksCleared,
    KVCacheEvent,
    removed_events,
    stored_event,
)
from kvplugin.hashing import split_key
from kvplugin.key_listener import KeyListener
from kvplugin.policies.eviction import (
    LRU,
    NO_CONTEXT,
    BlockContext,
    BlockInfo,
    EvictionPolicy,
    needs,
)
from kvplugin.ranking import Ranking
from kvplugin.residency import ResidencySampler

logger = logging.getLogger("vllm.kvplugin.block_pool")


class BlockPool:
    """Blocks 0..num_blocks-1, of which block 0 is the null block.

    Args:
        num_blocks: number of ids, the null block included; at least 1.
        policy: ranks keyed free blocks; LRU if not given.
        block_size: tokens of a block, for the events of `insert`.
        enable_events: collect KV events for `take_events`.
        medium: what the blocks stand for, for events.
        residency: follows sampled blocks, if given.
        lineage: keep of each keyed block what `info` tells, even if the policy does
            not ask for it (LRU does not).

    Raises:
        CapacityError: not even the null block fits.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        policy: EvictionPolicy | None = None,
        block_size: int = 0,
        enable_events: bool = False,
        medium: str = MEDIUM_GPU,
        residency: ResidencySampler | None = None,
        lineage: bool = False,
    ) -> None:
        if num_blocks < 1:
            raise CapacityError(
                f"a pool needs at least 1 block, the null block, got {num_blocks}"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.medium = medium
        self._refs = [0] * num_blocks
        policy = LRU() if policy is None else policy
        self._keys = BlockKeys(num_blocks, lineage or needs(policy, "needs_info"))
        self._hashes = self._keys.hashes
        # Popped from the end: low ids first in a new pool.
        self._unkeyed = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._reserved: list[int] = []
        self._views: dict[int, KVCacheBlock] = {}
        self._events: list[KVCacheEvent] | None = [] if enable_events else None
        self._residency = residency
        self.listener: KeyListener | None = None
        """Told of keys lost by the pool, of keys given by managers."""
        self._ranking = Ranking(policy, self._refs, self._hashes, self.info)

    # -- questions -----------------------------------------------------------------

    def get_num_free_blocks(self) -> int:
        """Blocks that `get_new_blocks` could hand out now."""
        return len(self._unkeyed) + len(self._ranking)

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that can be handed out at all: without null and reserved ones."""
        return self.num_blocks - 1 - len(self._reserved)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that somebody references; reserved ones do not count."""
        return self.num_usable_blocks - self.get_num_free_blocks()

    @property
    def num_keyed_blocks(self) -> int:
        """Blocks that carry a key, in use or not."""
        return len(self._keys)

    @property
    def reserved_blocks(self) -> Sequence[int]:
        """Blocks that `reserve` took out."""
        return self._reserved

    @property
    def policy_failures(self) -> int:
        """How often an eviction policy failed and was replaced by LRU."""
        return self._ranking.failures

    @property
    def wants_steps(self) -> bool:
        """Whether `step` makes a difference to the eviction policy."""
        return self._ranking.wants_steps

    @property
    def wants_demand(self) -> bool:
        """Whether `step` is to be told which keys waiting requests want."""
        return self._ranking.wants_demand

    def get_usage(self) -> float:
        """Share of the usable blocks in use, 0 to 1."""
        usable = self.num_usable_blocks
        return self.num_used_blocks / usable if usable else 0.0

    usage = property(get_usage)

    def info(self, block: int) -> BlockInfo:
        """Key and place of a keyed block.

        Raises:
            IntegrityError: the block carries no key, or the pool keeps no lineage.
        """
        return self._keys.info(block)

    def ref_count(self, block: int) -> int:
        """References to `block`; 0 for the null block, which is not counted."""
        return self._refs[block]

    def key_of(self, block: int) -> bytes | None:
        """Key of the block, None while it has none."""
        return self._keys.key_of(block)

    def block(self, block_id: int) -> KVCacheBlock:
        """The block as an object; one and the same for each id."""
        view = self._views.get(block_id)
        if view is None:
            view = self._views[block_id] = KVCacheBlock(self, block_id)
        return view

    def get(self, key: bytes) -> int | None:
        """A block under `key` (the first inserted, if several), or None."""
        block_hash, group = split_key(key)
        return self._keys.index.of_group(group).get(block_hash)

    def get_cached_block(
        self, block_hash: bytes, kv_cache_group_ids: Iterable[int]
    ) -> list[int] | None:
        """One block for each group, or None if any group has none."""
        of_group = self._keys.index.of_group
        found = [of_group(group).get(block_hash) for group in kv_cache_group_ids]
        return None if None in found else cast("list[int]", found)

    def cached_blocks(self, group: int) -> dict[bytes, int]:
        """The index of one group, block hash -> first block; read only."""
        return self._keys.index.of_group(group)

    def num_evictable(self, ids: Iterable[int]) -> int:
        """How many of `ids` are free: adopting them takes from the free blocks."""
        refs = self._refs
        return [refs[block] for block in ids if block].count(0)

    def step(
        self, now: float, soon: Iterable[bytes], dropped: Mapping[bytes, int]
    ) -> None:
        """An engine's step begins; for the eviction policy, see there."""
        self._ranking.step(now, soon, dropped)

    # -- life of a block -----------------------------------------------------------

    def get_new_blocks(self, n: int) -> list[int]:
        """Take `n` free blocks: unkeyed ones first, then the policy's victims.

        Each comes with one reference and no key. All or nothing.

        Raises:
            CapacityError: fewer than `n` blocks are free; nothing has changed.
        """
        unkeyed = self._unkeyed
        if n <= len(unkeyed):
            taken = unkeyed[-n:] if n > 0 else []
            del unkeyed[len(unkeyed) - len(taken) :]
            taken.reverse()
        elif n <= self.get_num_free_blocks():
            taken = self._ranking.victims(n - len(unkeyed))
            self._drop_keys(taken)
            if unkeyed:
                taken = unkeyed[::-1] + taken
                unkeyed.clear()
        else:
            raise CapacityError(
                f"{n} blocks wanted, {self.get_num_free_blocks()} of "
                f"{self.num_usable_blocks} free"
            )
        refs = self._refs
        for block in taken:
            refs[block] = 1
        if self._residency is not None:
            self._residency.evicted(taken)
            self._residency.allocated(taken)
        return taken

    def reserve(self, n: int) -> list[int]:
        """Take `n` blocks out of the pool for good (sink tokens).

        Raises:
            CapacityError: fewer than `n` blocks are free; nothing has changed.
        """
        blocks = self.get_new_blocks(n)
        self._reserved += blocks
        return blocks

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
            if not self._refs[block] or self._hashes[block] is not None:
                raise IntegrityError(f"block {block} cannot be given a key")
        if not ids:
            return
        group = split_key(keys[0])[1]
        hashes = [split_key(key)[0] for key in keys]
        before = None if parent is None else split_key(parent)[0]
        self.cache_run(ids, hashes, before, depth, group, ctx)
        if self._events is not None:
            self._events.append(
                stored_event(
                    hashes, before, token_ids, self.block_size, self.medium, group
                )
            )

    def cache_run(
        self,
        ids: Sequence[int],
        hashes: Sequence[bytes],
        parent: bytes | None,
        depth: int,
        group: int,
        ctx: BlockContext = NO_CONTEXT,
        fresh: bool = True,
    ) -> Sequence[int]:
        """`insert` for a manager's own row, without its checks and its event.

        Null blocks are passed over.

        Args:
            ids: consecutive blocks of one request, in use or null.
            hashes: one block hash a block.
            parent: hash of the block before `ids[0]`, None at the start.
            depth: index of `ids[0]` in its request.
            group: number of the group.
            ctx: who inserts, for the policy.
            fresh: whether no block has a key; if not sure, those that have one are
                passed over too.

        Returns:
            Positions in `ids` of the blocks that were given a key.
        """
        if NULL_BLOCK in ids or not fresh:
            return self._cache_some(ids, hashes, parent, depth, group, ctx)
        self._keys.give(ids, hashes, parent, depth, group)
        self._ranking.insert(ids, ctx)
        return range(len(ids))

    def _cache_some(
        self,
        ids: Sequence[int],
        hashes: Sequence[bytes],
        parent: bytes | None,
        depth: int,
        group: int,
        ctx: BlockContext,
    ) -> Sequence[int]:
        """`cache_run` where blocks may be null or have a key: those are left out."""
        before = [parent, *hashes[:-1]]
        given = [
            i for i, block in enumerate(ids) if block and self._hashes[block] is None
        ]
        for i in given:
            self._keys.give([ids[i]], [hashes[i]], before[i], depth + i, group)
        if given:
            self._ranking.insert([ids[i] for i in given], ctx)
        return given

    def touch(self, ids: Iterable[int]) -> None:
        """Add one reference to each block; keyed free blocks come into use. Null
        blocks are skipped.

        Raises:
            IntegrityError: a block is free and has no key (its content is nobody's);
                nothing has changed.
        """
        refs, hashes = self._refs, self._hashes
        ids = [block for block in ids if block]
        idle = [block for block in ids if not refs[block]]
        if foreign := [block for block in idle if hashes[block] is None]:
            raise IntegrityError(f"block {foreign[0]} is free and has no key")
        for block in ids:
            refs[block] += 1
        if idle:
            if len(set(idle)) < len(idle):  # listed twice, in use once
                idle = list(dict.fromkeys(idle))
            self._ranking.pin(idle)
        if self._residency is not None:
            self._residency.used(ids)

    def adopt(self, ids: Sequence[int], ctx: BlockContext = NO_CONTEXT) -> None:
        """`touch` by a request that will read the blocks: the policy hears a hit."""
        self.touch(ids)
        if self._ranking.wants_hits:
            self._ranking.hit([b for b in ids if self._hashes[b] is not None], ctx)

    def free_blocks(self, ids: Iterable[int]) -> None:
        """Drop one reference of each block; list what should be evicted first, first
        (the tail of a request before its head). Null blocks are skipped.

        Raises:
            IntegrityError: a block has no reference left to drop; nothing has changed.
        """
        refs, hashes = self._refs, self._hashes
        ids = ids if isinstance(ids, list) else list(ids)
        keyed: list[int] = []
        unkeyed: list[int] = []
        release, stack = keyed.append, unkeyed.append
        rest = iter(ids)
        for block in rest:
            left = refs[block] - 1
            if not left:
                refs[block] = 0
                if hashes[block] is None:
                    stack(block)
                else:
                    release(block)
            elif left > 0:
                refs[block] = left
            elif block:
                done = len(ids) - len(list(rest)) - 1
                for freed in filter(None, ids[:done]):
                    refs[freed] += 1
                raise IntegrityError(f"block {block} is freed once too often")
        if unkeyed:
            self._unkeyed += unkeyed[::-1]
        if keyed:
            self._ranking.release(keyed)

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
                    f"block {block} is outside the pool of {self.num_blocks}: whoever "
                    f"reported it (a worker?) may only name allocated blocks"
                )
            if self._hashes[block] is not None:
                keyed.append(block)
        if not keyed:
            return
        idle = [block for block in keyed if not self._refs[block]]
        self._ranking.forget(keyed, len(idle))
        self._drop_keys(keyed)
        self._unkeyed += idle
        if self._residency is not None:
            self._residency.evicted(keyed)

    def drop_all_keys(self) -> None:
        """Forget every key at once; blocks in use stay in use without one."""
        keyed = self._keys.keyed()
        idle = [block for block in keyed if not self._refs[block]]
        self._ranking.forget(keyed, len(idle))
        self._keys.clear()
        self._unkeyed += idle
        if self._residency is not None:
            self._residency.reset()
        if self._events is not None:
            self._events.append(AllBlocksCleared())
        if self.listener is not None:
            self.listener.all_keys_lost()

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

    @property
    def events_enabled(self) -> bool:
        """Whether somebody wants the pool's events."""
        return self._events is not None

    def report(self, event: KVCacheEvent) -> None:
        """Queue an event about the pool's blocks; dropped if nobody wants events."""
        if self._events is not None:
            self._events.append(event)

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
        refs, hashes = self._refs, self._hashes
        unkeyed = [
            block
            for block in range(1, self.num_blocks)
            if not refs[block] and hashes[block] is None
        ]
        for holds, what in (
            (min(refs) >= 0, "negative references"),
            (not refs[NULL_BLOCK], "the null block is counted"),
            (hashes[NULL_BLOCK] is None, "the null block has a key"),
            (all(refs[block] for block in self._reserved), "a reserved block is free"),
            (sorted(self._unkeyed) == unkeyed, "the stack of key-less blocks is wrong"),
        ):
            if not holds:
                raise IntegrityError(what)
        self._keys.check()
        self._ranking.check()

    # -- inside --------------------------------------------------------------------

    def _drop_keys(self, ids: Sequence[int]) -> None:
        """Take keyed blocks out of the index; the policy already knows."""
        if self._events is None and self.listener is None:
            self._keys.take(ids)
            return
        lost = self._keys.take_each(ids)
        if self.listener is not None:
            self.listener.keys_lost(lost)
        if self._events is not None:
            self._events += removed_events(lost, self.medium)
