"""The host tier: which chunks are in host memory, and which may leave it.

Host memory is cut into pools of equal slots, and each slot keeps one chunk of one of
its pool's groups. The slots of a pool are a `BlockPool`: being written is owned without
a key, readable is keyed, pinned is a reference. Slots are numbered from 1, since the
pool's block 0 stands for no memory. A key names its group, so each key has one pool.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from kvplugin.block_pool import BlockPool
from kvplugin.connectors.offload.chunks import Chunk, Chunking
from kvplugin.connectors.offload.messages import HostPool
from kvplugin.connectors.offload.tier_events import stored_event
from kvplugin.contract import RequestView
from kvplugin.errors import IntegrityError
from kvplugin.events import MEDIUM_CPU, KVCacheEvent
from kvplugin.hashing import make_key, split_key
from kvplugin.policies.eviction import NO_CONTEXT, BlockContext, EvictionPolicy


class Reservation(NamedTuple):
    """Slots that are being written, one a chunk of one group."""

    cut: Chunking
    chunks: Sequence[Chunk]
    slots: Sequence[int]
    epoch: int


class HostTier:
    """Chunks by key.

    Args:
        cuts: the groups that are kept.
        pools: what each pool holds; each group is in one of them.
        make_policy: which chunks leave first, for a pool of so many ids.
        enable_events: collect KV events.
    """

    def __init__(
        self,
        cuts: Iterable[Chunking],
        pools: Sequence[HostPool],
        make_policy: Callable[[int], EvictionPolicy],
        *,
        enable_events: bool = False,
    ) -> None:
        self.epoch = 0
        """How often the tier was cleared."""
        self.version = 0
        """Changes with what is readable or being written."""
        self._cuts = {cut.index: cut for cut in cuts}
        self._pools: list[BlockPool] = []
        self._pool_of: dict[int, BlockPool] = {}
        self._numbers: dict[int, int] = {}
        self._blocks_per_slot: list[int] = []
        for shared in pools:
            blocks = self._cuts[shared.groups[0]].blocks
            ids = shared.host_blocks // blocks + 1
            pool = BlockPool(
                ids,
                policy=make_policy(ids),
                enable_events=enable_events,
                medium=MEDIUM_CPU,
            )
            self._numbers |= dict.fromkeys(shared.groups, len(self._pools))
            self._pools.append(pool)
            self._blocks_per_slot.append(blocks)
            self._pool_of |= dict.fromkeys(shared.groups, pool)
        self._writing: dict[bytes, int] = {}
        self._evicted_blocks = 0

    # -- questions -----------------------------------------------------------------

    @property
    def num_slots(self) -> int:
        """Chunks that the tier holds."""
        return sum(pool.num_usable_blocks for pool in self._pools)

    @property
    def num_stored_blocks(self) -> int:
        """Engine blocks that can be hit."""
        return sum(
            pool.num_keyed_blocks * blocks
            for pool, blocks in zip(self._pools, self._blocks_per_slot, strict=True)
        )

    @property
    def policy_failures(self) -> int:
        """How often an eviction policy failed and was replaced by LRU."""
        return sum(pool.policy_failures for pool in self._pools)

    def readable(self, group: int) -> Mapping[bytes, int]:
        """Slots of the group's readable chunks by the hash in their key; a view."""
        return self._pool_of[group].cached_blocks(group)

    def slot_of(self, key: bytes) -> int | None:
        """Slot of a readable chunk."""
        block_hash, group = split_key(key)
        return self.readable(group).get(block_hash)

    def is_writing(self, key: bytes) -> bool:
        """Whether the chunk is on its way into host memory."""
        return key in self._writing

    def find(self, key: bytes) -> int | None:
        """Slot of a chunk that is readable, or will be if all goes well: storing it
        again would be in vain."""
        slot = self.slot_of(key)
        return self._writing.get(key) if slot is None else slot

    def run(self, cut: Chunking, request: RequestView, numbers: range) -> list[int]:
        """Slots of a request's chunks of these numbers, ascending, as far as `find`
        knows them: up to the first that it does not."""
        hashes, group, each = request.block_hashes, cut.index, cut.hashes
        readable, writing = self.readable(group), self._writing
        slots: list[int] = []
        last = min(len(hashes), numbers.stop * each)
        for i in range((numbers.start + 1) * each - 1, last, each):
            slot = readable.get(hashes[i])
            if slot is None:
                slot = writing.get(make_key(hashes[i], group))
                if slot is None:
                    break
            slots.append(slot)
        return slots

    def pool_of(self, group: int) -> int:
        """Number of the pool whose slots the group shares."""
        return self._numbers[group]

    def take_evictions(self) -> int:
        """Engine blocks evicted since the last call."""
        evicted, self._evicted_blocks = self._evicted_blocks, 0
        return evicted

    def step(self, now: float) -> None:
        """An engine's step begins: the policies hear the time.

        Args:
            now: seconds, of the clock of `BlockContext.expires_at`.
        """
        for pool in self._pools:
            if pool.wants_steps:
                pool.step(now, (), {})

    # -- writing -------------------------------------------------------------------

    def room(self, group: int) -> int:
        """Slots that `reserve` could give the group now."""
        return self._pool_of[group].get_num_free_blocks()

    def reserve(self, cut: Chunking, chunks: Sequence[Chunk]) -> Reservation:
        """Slots for `chunks`, evicting what nobody uses.

        Raises:
            CapacityError: there are more than `room` says; nothing has changed.
        """
        pool = self._pool_of[cut.index]
        self.version += bool(chunks)
        before = pool.num_keyed_blocks
        slots = pool.get_new_blocks(len(chunks))
        self._evicted_blocks += (before - pool.num_keyed_blocks) * cut.blocks
        for chunk, slot in zip(chunks, slots, strict=True):
            self._writing[chunk.key] = slot
        return Reservation(cut, chunks, slots, self.epoch)

    def commit(self, reservation: Reservation, ctx: BlockContext = NO_CONTEXT) -> bool:
        """The bytes are in: the chunks can be hit. They stay referenced until
        `release`.

        Args:
            reservation: where they are.
            ctx: whose they are, for the policy.

        Returns:
            False if the tier was cleared meanwhile: bytes and references are dropped.
        """
        cut, pool = reservation.cut, self._pool_of[reservation.cut.index]
        if reservation.epoch != self.epoch:
            pool.free_blocks(reservation.slots)
            return False
        self.version += 1
        for chunk, slot in zip(reservation.chunks, reservation.slots, strict=True):
            del self._writing[chunk.key]
            block_hash, group = split_key(chunk.key)
            parent = None if chunk.parent is None else split_key(chunk.parent)[0]
            pool.cache_run([slot], [block_hash], parent, chunk.number, group, ctx)
            if pool.events_enabled:
                pool.report(stored_event(cut, chunk))
        return True

    def abandon(self, reservation: Reservation) -> None:
        """The bytes did not arrive: as if the store had never been."""
        if reservation.epoch == self.epoch:
            self.version += 1
            for chunk in reservation.chunks:
                del self._writing[chunk.key]
        self._pool_of[reservation.cut.index].free_blocks(reservation.slots)

    # -- use -----------------------------------------------------------------------

    def pin(
        self, group: int, slots: Sequence[int], ctx: BlockContext = NO_CONTEXT
    ) -> None:
        """Keep slots readable and unchanged until `release`; a hit by `ctx`."""
        self._pool_of[group].adopt(slots, ctx)

    def hold(self, group: int, slots: Sequence[int]) -> None:
        """Keep slots in use, those being written too, until `release`; no hit."""
        self._pool_of[group].touch(slots)

    def release(self, group: int, slots: Iterable[int]) -> None:
        """Undo `pin`, `hold`, or the reference that `commit` left; what may leave
        first, first."""
        self._pool_of[group].free_blocks(slots)

    def release_all(self, held: Iterable[tuple[int, int]]) -> None:
        """`release` of (group, slot) of many groups, what may leave first, first."""
        each: list[list[int]] = [[] for _ in self._pools]
        slots_of = {group: each[number] for group, number in self._numbers.items()}
        for group, slot in held:
            slots_of[group].append(slot)
        for pool, slots in zip(self._pools, each, strict=True):
            pool.free_blocks(slots)

    # -- forgetting ----------------------------------------------------------------

    def drop(self, group: int, slots: Iterable[int]) -> None:
        """Make chunks unreadable whose bytes are in doubt."""
        self.version += 1
        self._pool_of[group].evict_blocks(slots)

    def clear(self) -> None:
        """Forget every chunk, also those being written."""
        self.epoch += 1
        self.version += 1
        self._writing.clear()
        # Block by block: the event that says "all cleared" names no medium, and
        # readers would forget the engine's own blocks as well.
        for pool in self._pools:
            pool.evict_blocks(range(1, pool.num_blocks))

    def take_events(self) -> list[KVCacheEvent]:
        """KV events since the last call, pool by pool."""
        return [event for pool in self._pools for event in pool.take_events()]

    def check(self, uses: Iterable[tuple[int, int]]) -> None:
        """Verify every invariant, in O(slots).

        Args:
            uses: (group, slot) of each reference that somebody has.

        Raises:
            IntegrityError: one does not hold, or the references are others.
        """
        wanted = [[0] * pool.num_blocks for pool in self._pools]
        for group, slot in uses:
            wanted[self._numbers[group]][slot] += 1
        for number, pool in enumerate(self._pools):
            pool.check()
            found = [pool.ref_count(slot) for slot in range(pool.num_blocks)]
            if found != wanted[number]:
                wrong = [
                    (slot, found[slot], wanted[number][slot])
                    for slot in range(pool.num_blocks)
                    if found[slot] != wanted[number][slot]
                ]
                raise IntegrityError(
                    f"host pool {number}: (slot, references, uses) of {wrong}"
                )
        for key, slot in self._writing.items():
            pool = self._pool_of[split_key(key)[1]]
            if not pool.ref_count(slot) or pool.key_of(slot) is not None:
                raise IntegrityError(f"slot {slot} is not being written")
