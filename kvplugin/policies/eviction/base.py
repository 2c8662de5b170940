"""The protocol between a block pool and the policy that ranks its keyed blocks.

The pool owns blocks, references, keys and the hash index; a policy only ranks. It
sees int ids of blocks that carry a key. A block is *evictable* for the policy
between `release` (or the end of its last use) and the next `pin`, `forget` or
`victims`. Order of calls:

- `insert` when a block in use is given a key; it becomes evictable at its `release`;
- `pin` and `release` only where the reference count of a keyed block goes 0 -> 1 and
  1 -> 0; a hit on an evictable block is `pin`, then `hit`, and a `pin` without one is
  no hit (a request comes back after a preemption, a tier keeps blocks while it writes);
- a block returned by `victims` gets no `forget`; a key lost in any other way does.

Key-less blocks and the null block are never shown. One call covers all blocks of one
request and group. Every method is O(1) or O(log n) a block, `victims` amortised.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class BlockInfo(NamedTuple):
    """What a pool tells about a keyed block; the pool owns the data."""

    key: bytes
    parent_key: bytes | None
    group: int
    depth: int
    """Index of the block in its request, 0 for the first."""


@dataclass(frozen=True, slots=True)
class BlockContext:
    """Who inserts or hits: one object for all blocks of the call."""

    priority: int = 0
    """Higher is kept longer."""
    expires_at: float | None = None
    """Time of the pool's clock after which retention ends, in seconds."""
    session: str | None = None
    turn: int = 0
    cost_per_block: float = 0.0
    """Cost of computing one of these blocks again, in the caller's unit."""
    ends_session: bool = False
    """Nobody will continue the session after this request."""


NO_CONTEXT = BlockContext()


def context_of(request: object) -> BlockContext:
    """The `block_context` of a request that has one."""
    return getattr(request, "block_context", None) or NO_CONTEXT


class EvictionPolicy(Protocol):
    """Ranks evictable blocks. Must leave model outputs unchanged by construction:
    it can only choose among blocks that nobody uses.

    Attributes that say what a policy does not need, each True if missing; what nobody
    needs costs nothing (`needs` reads them; a class says it anew for itself):

    - `needs_info`: it calls `info`. A pool that keeps no lineage is a third faster.
    - `needs_hits`: its `hit` makes a difference.
    - `needs_steps`: its `step` makes a difference.
    - `needs_demand`: `soon` and `dropped` do, too. The keys that waiting requests want
      are followed only for such a policy; others get none.
    """

    def bind(self, num_blocks: int, info: Callable[[int], BlockInfo]) -> None:
        """Called once by the pool. `info(id)` is O(1) and valid for keyed ids."""

    def insert(self, ids: Sequence[int], ctx: BlockContext) -> None:
        """Blocks in use were just given a key."""

    def hit(self, ids: Sequence[int], ctx: BlockContext) -> None:
        """A request adopted these blocks (live ones too), all in use now."""

    def pin(self, ids: Sequence[int]) -> None:
        """Evictable blocks come into use and leave the evictable set."""

    def release(self, ids: Sequence[int]) -> None:
        """Keyed blocks fell out of use; list order: what should go first, first."""

    def forget(self, ids: Sequence[int]) -> None:
        """Keys were lost without a choice of ours, evictable blocks or not."""

    def victims(self, n: int) -> list[int]:
        """Exactly `n` distinct evictable ids, removed from the evictable set.

        Raises:
            ValueError: `n` exceeds `len(self)`; nothing has changed.
        """

    def step(
        self, now: float, soon: Iterable[bytes], dropped: Mapping[bytes, int]
    ) -> None:
        """An engine's step begins. O(changed).

        Args:
            now: seconds, of the clock of `BlockContext.expires_at`.
            soon: keys that waiting requests began to want, once for each request.
            dropped: keys that they want no longer, and by how many of them.
        """

    def order(self) -> Iterator[int]:
        """Evictable ids, next victim first; changes nothing."""

    def __len__(self) -> int:
        """Number of evictable blocks."""

    def check(self) -> None:
        """Raise `IntegrityError` if the policy's own state is inconsistent."""


def needs(policy: EvictionPolicy, what: str) -> bool:
    """What a policy says of itself in its attribute `what`, e.g. ``needs_hits``.

    Not what a class inherits: who overrides a method may well need what the base did
    not.
    """
    said = {**vars(type(policy)), **getattr(policy, "__dict__", {})}
    return bool(said.get(what, True))


def hears_demand(policy: EvictionPolicy) -> bool:
    """Whether the keys that waiting requests want make a difference to a policy."""
    return needs(policy, "needs_steps") and needs(policy, "needs_demand")
