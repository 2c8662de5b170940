"""Reads under way, as the scheduler half knows them."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvplugin.connectors.nixl.messages import Completion, GroupRead, ReadOrder
from kvplugin.connectors.nixl.peers import Peer
from kvplugin.connectors.nixl.requests import Pull
from kvplugin.connectors.under_way import UnderWay
from kvplugin.errors import IntegrityError


@dataclass(slots=True, eq=False)
class Read:
    """An order, and the ranks that still have to report it."""

    order: ReadOrder
    pull: Pull | None
    """None: it was refused from the start, on behalf of nobody we know."""
    peer: Peer | None
    ranks: set[int]
    started: float
    num_tokens: int
    unsound: list[int]
    error: str = ""
    discarded: bool = False
    nbytes: int = 0
    seconds: float = 0.0
    """Of the slowest rank."""
    given_up_by: int | None = None
    """Number of the plan whose executors tell its request that it failed; the engine's
    blocks are referenced until it really ends."""

    def count(self, done: Completion) -> None:
        """Take in one rank's result."""
        self.error = self.error or done.error
        self.discarded = self.discarded or done.discarded
        self.nbytes += done.nbytes
        self.seconds = max(self.seconds, done.seconds)


@dataclass(slots=True)
class _OfPeer:
    """Of a peer from which something is under way."""

    reads: int = 0
    proven: int = 0
    """A read has ended well after all orders below this id were given."""


class ReadsUnderWay(UnderWay[Read]):
    """All of them, and which take too long."""

    def __init__(self, ranks: int, clock: Callable[[], float], timeout: float) -> None:
        super().__init__(ranks, clock, timeout)
        self._peers: dict[str, _OfPeer] = {}

    def begin(
        self,
        request_id: str,
        parts: list[GroupRead],
        *,
        peer: Peer | None = None,
        pull: Pull | None = None,
        generations: list[tuple[int, int]] | None = None,
        num_tokens: int = 0,
        unsound: list[int] | None = None,
        refusal: str = "",
    ) -> Read:
        """Order a read of all ranks; with a `refusal`, one that fails."""
        order = ReadOrder(
            id=self.new_id(),
            request_id=request_id,
            peer_id=peer.peer_id if peer is not None else "",
            parts=parts,
            generations=generations or [],
            refusal=refusal,
        )
        read = Read(
            order,
            pull,
            peer,
            self.new_ranks(),
            self._clock(),
            num_tokens,
            unsound or [],
        )
        self._peers.setdefault(order.peer_id, _OfPeer()).reads += 1
        self.add(read)
        return read

    def _remove(self, read: Read) -> None:
        super()._remove(read)
        peer = self._peers[read.order.peer_id]
        peer.reads -= 1
        if not read.error:
            peer.proven = self._num_ids
        if not peer.reads:
            del self._peers[read.order.peer_id]

    def is_silent(self, read: Read) -> bool:
        """Whether nothing of the read's peer has ended well since it was ordered: a
        peer that others are read from is busy, not dead."""
        return read.order.id >= self._peers[read.order.peer_id].proven

    @property
    def awaited(self) -> Iterator[Read]:
        """Reads that some rank has not told the engine to have ended or failed."""
        return self.untold(self)

    def check(self) -> None:
        """Verify the accounts of overdue reads and of peers.

        Raises:
            IntegrityError: it is wrong.
        """
        super().check()
        peers = Counter(read.order.peer_id for read in self)
        if peers != {name: peer.reads for name, peer in self._peers.items()}:
            raise IntegrityError(f"reads of peers are counted wrong: {self._peers}")
