"""Reads under way, as the scheduler half knows them."""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvplugin.connectors.nixl.messages import Completion, GroupRead, ReadOrder, Report
from kvplugin.connectors.nixl.peers import Peer
from kvplugin.connectors.nixl.requests import Pull
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

    def report(self, rank: int, done: Completion) -> bool:
        """One rank's result.

        Returns:
            True when it was the last one missing; a second report of a rank is
            ignored.
        """
        if rank not in self.ranks:
            return False
        self.ranks.remove(rank)
        self.error = self.error or done.error
        self.discarded = self.discarded or done.discarded
        self.nbytes += done.nbytes
        self.seconds = max(self.seconds, done.seconds)
        return not self.ranks


@dataclass(slots=True)
class _OfPeer:
    """Of a peer from which something is under way."""

    reads: int = 0
    proven: int = 0
    """A read has ended well after all orders below this id were given."""


class ReadsUnderWay:
    """All of them, and which take too long.

    Args:
        ranks: that report each read.
        clock: monotonic seconds.
        timeout: seconds after which a read is overdue.
    """

    def __init__(self, ranks: int, clock: Callable[[], float], timeout: float) -> None:
        self.overdue_blocks = 0
        """Engine blocks of overdue reads."""
        self._ranks = ranks
        self._clock = clock
        self._timeout = timeout
        self._next_id = 0
        self._reads: dict[int, Read] = {}
        self._peers: dict[str, _OfPeer] = {}
        self._by_age: deque[int] = deque()
        self._overdue: set[int] = set()
        self._executed: dict[int, int] = {}

    def __iter__(self) -> Iterator[Read]:
        """Oldest first."""
        return iter(self._reads.values())

    def __len__(self) -> int:
        return len(self._reads)

    @property
    def num_in_time(self) -> int:
        """Reads that are not overdue."""
        return len(self._reads) - len(self._overdue)

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
            id=self._next_id,
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
            set(range(self._ranks)),
            self._clock(),
            num_tokens,
            unsound or [],
        )
        self._next_id += 1
        self._reads[order.id] = read
        self._peers.setdefault(order.peer_id, _OfPeer()).reads += 1
        self._by_age.append(order.id)
        return read

    def ended(self, report: Report) -> Iterator[Read]:
        """Take a report; reads of which it was the last one missing. Late, repeated and
        foreign ones change nothing."""
        if not 0 <= report.rank < self._ranks:
            return
        latest = self._executed.get(report.rank, -1)
        self._executed[report.rank] = max(latest, report.step)
        for done in report.completions:
            read = self._reads.get(done.id)
            if read is not None and read.report(report.rank, done):
                self._remove(read)
                yield read

    def _remove(self, read: Read) -> None:
        del self._reads[read.order.id]
        if read.order.id in self._overdue:
            self._overdue.remove(read.order.id)
            self.overdue_blocks -= len(read.order.engine_ids)
        peer = self._peers[read.order.peer_id]
        peer.reads -= 1
        if not read.error:
            peer.proven = self._next_id
        if not peer.reads:
            del self._peers[read.order.peer_id]

    def is_silent(self, read: Read) -> bool:
        """Whether nothing of the read's peer has ended well since it was ordered: a
        peer that others are read from is busy, not dead."""
        return read.order.id >= self._peers[read.order.peer_id].proven

    def pop_overdue(self) -> list[Read]:
        """Reads whose deadline has passed since the last call, oldest first."""
        latest = self._clock() - self._timeout
        late = []
        while self._by_age:
            read = self._reads.get(self._by_age[0])
            if read is not None and read.started > latest:
                break
            self._by_age.popleft()
            if read is not None:
                self._overdue.add(read.order.id)
                self.overdue_blocks += len(read.order.engine_ids)
                late.append(read)
        return late

    @property
    def awaited(self) -> Iterator[Read]:
        """Reads that some rank has not told the engine to have ended or failed."""
        known = len(self._executed) == self._ranks
        executed = min(self._executed.values()) if known else -1
        for read in self._reads.values():
            if read.given_up_by is None or read.given_up_by > executed:
                yield read

    def check(self) -> None:
        """Verify the accounts of overdue reads and of peers.

        Raises:
            IntegrityError: it is wrong.
        """
        late = (self._reads[id_] for id_ in self._overdue)
        blocks = sum(len(read.order.engine_ids) for read in late)
        if blocks != self.overdue_blocks:
            raise IntegrityError(
                f"{self.overdue_blocks} blocks are said to be overdue, {blocks} are"
            )
        peers = Counter(read.order.peer_id for read in self._reads.values())
        if peers != {name: peer.reads for name, peer in self._peers.items()}:
            raise IntegrityError(f"reads of peers are counted wrong: {self._peers}")
