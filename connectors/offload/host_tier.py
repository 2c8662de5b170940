"""The host tier: which chunks are in host memory, and which may leave it.

Each slot of host memory keeps one chunk. The slots are a `BlockPool`: being written
is owned without a key, readable is keyed, pinned is a reference. Slots are numbered
from 1, since the pool's block 0 stands for no memory.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from kvplugin.block_pool import BlockPool
from kvplugin.connectors.offload.chunks import Chunk
from kvplugin.events import MEDIUM_CPU, KVCacheEvent
from kvplugin.policies.eviction import NO_CONTEXT, BlockContext, EvictionPolicy


class Reservation(NamedTuple):
    """Slots that are being written, one a chunk."""

    chunks: Sequence[Chunk]
    slots: Sequence[int]
    epoch: int


class HostTier:
    """Chunks by key.

    Args:
        num_slots: chunks that host memory holds.
        policy: which chunks leave first.
        tokens_per_chunk: for events.
        enable_events: collect KV events.
    """

    def __init__(
        self,
        num_slots: int,
        policy: EvictionPolicy,
        tokens_per_chunk: int,
        *,
        enable_events: bool = False,
    ) -> None:
        self._pool = BlockPool(
            num_slots + 1,
            policy=policy,
            block_size=tokens_per_chunk,
            enable_events=enable_events,
            medium=MEDIUM_CPU,
            lineage=True,
        )
        self._writing: set[bytes] = set()
        self._epoch = 0
        self._evictions = 0

    @property
    def num_stored(self) -> int:
        """Chunks that can be hit."""
        return self._pool.num_keyed_blocks

    @property
    def num_busy(self) -> int:
        """Slots being written or read."""
        return self._pool.num_used_blocks

    @property
    def policy_failures(self) -> int:
        """How often the eviction policy failed and was replaced by LRU."""
        return self._pool.policy_failures

    def slot_of(self, key: bytes) -> int | None:
        """Slot of a readable chunk."""
        return self._pool.get(key)

    def take_evictions(self) -> int:
        """Chunks evicted since the last call."""
        evictions, self._evictions = self._evictions, 0
        return evictions

    def is_writing(self, key: bytes) -> bool:
        """Whether the chunk is on its way into host memory."""
        return key in self._writing

    def holds(self, key: bytes) -> bool:
        """Whether storing the chunk again would be in vain."""
        return key in self._writing or self._pool.get(key) is not None

    def step(self, now: float) -> None:
        """An engine's step begins: the policy hears the time.

        Args:
            now: seconds, of the clock of `BlockContext.expires_at`.
        """
        if self._pool.wants_steps:
            self._pool.step(now, (), {})

    # -- writing -------------------------------------------------------------------

    def reserve(self, chunks: Sequence[Chunk]) -> Reservation:
        """Slots for as many leading `chunks` as fit, evicting what nobody uses."""
        fitting = chunks[: self._pool.get_num_free_blocks()]
        before = self._pool.num_keyed_blocks
        slots = self._pool.get_new_blocks(len(fitting))
        self._evictions += before - self._pool.num_keyed_blocks
        self._writing.update(chunk.key for chunk in fitting)
        return Reservation(fitting, slots, self._epoch)

    def commit(self, reservation: Reservation, ctx: BlockContext = NO_CONTEXT) -> bool:
        """The bytes are in: the chunks can be hit.

        Args:
            reservation: where they are.
            ctx: whose they are, for the policy.

        Returns:
            False if the tier was cleared meanwhile and the bytes are dropped.
        """
        if reservation.epoch != self._epoch:
            self._pool.free_blocks(reservation.slots)
            return False
        self._writing.difference_update(chunk.key for chunk in reservation.chunks)
        for chunk, slot in zip(reservation.chunks, reservation.slots, strict=True):
            self._pool.insert(
                [slot], [chunk.key], parent=chunk.parent, depth=chunk.number, ctx=ctx
            )
        # The tail of a prefix may leave before its head, also if it came later.
        path = list(self._path_from(reservation.chunks[-1].key))
        self._pool.touch(path)
        self._pool.free_blocks(reversed(reservation.slots))
        self._pool.free_blocks(path)
        return True

    def _path_from(self, key: bytes | None) -> Iterator[int]:
        """Slots of a chunk and of those before it, from the tail to the head, as far
        as they are readable."""
        while key is not None and (slot := self._pool.get(key)) is not None:
            yield slot
            key = self._pool.info(slot).parent_key

    def abandon(self, reservation: Reservation) -> None:
        """The bytes did not arrive: as if the store had never been."""
        if reservation.epoch == self._epoch:
            self._writing.difference_update(c.key for c in reservation.chunks)
        self._pool.free_blocks(reservation.slots)

    # -- reading -------------------------------------------------------------------

    def pin(self, slots: Sequence[int], ctx: BlockContext = NO_CONTEXT) -> None:
        """Keep slots readable and unchanged until `unpin`; counts as a hit by `ctx`."""
        self._pool.adopt(slots, ctx)

    def unpin(self, slots: Sequence[int]) -> None:
        """Undo `pin`; slots in request order."""
        self._pool.free_blocks(reversed(slots))

    def refresh(self, keys: Iterable[bytes]) -> None:
        """Make the readable chunks among `keys` (in request order) the most recently
        used ones, a head more so than its tail."""
        with self.protecting(keys):
            pass

    @contextmanager
    def protecting(self, keys: Iterable[bytes]) -> Iterator[None]:
        """Inside, the readable chunks among `keys` (in request order) are not
        evicted; afterwards they are the most recently used."""
        slots = [s for s in map(self._pool.get, keys) if s is not None]
        self._pool.touch(slots)
        try:
            yield
        finally:
            self.unpin(slots)

    # -- forgetting ----------------------------------------------------------------

    def drop(self, slots: Iterable[int]) -> None:
        """Make chunks unreadable whose bytes are in doubt."""
        self._pool.evict_blocks(slots)

    def clear(self) -> None:
        """Forget every chunk, also those being written."""
        self._epoch += 1
        self._writing.clear()
        # Block by block: the event that says "all cleared" names no medium, and
        # readers would forget the engine's own blocks as well.
        self._pool.evict_blocks(range(1, self._pool.num_blocks))

    def take_events(self) -> list[KVCacheEvent]:
        """KV events since the last call."""
        return self._pool.take_events()

    def check(self) -> None:
        """Raise `IntegrityError` if an invariant does not hold."""
        self._pool.check()
