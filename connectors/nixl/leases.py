"""Leases: who may read the blocks of requests that have ended, and until when.

A lease begins when its request ends, and from then on runs out by itself. Readers open
it, which lets it run from the beginning, renew it while they want it and close it. It
is over when all who opened it have closed it, when somebody closes it whom nobody else
is to wait for, or when it has run out. Then its blocks' generations change, but of
those that another lease names too, and the engine is told that its request has ended.

Readers are several where a request is sampled more than once. A reader that has closed
does not come back: its question may have been overtaken by its farewell.
"""

import math
import threading
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from kvplugin.connectors.nixl.generations import Generations
from kvplugin.connectors.nixl.lease import MOST_READERS, End, Lease, name_for
from kvplugin.connectors.nixl.wire import (
    Close,
    Closed,
    Gone,
    Granted,
    Open,
    Renew,
    Renewed,
)
from kvplugin.errors import IntegrityError


class EndedLeases(NamedTuple):
    """What has ended since somebody last asked."""

    request_ids: list[str]
    """Requests whose blocks nobody reads any more."""
    generations: list[tuple[int, int]]
    """(block, its generation from now on): to be written before the blocks can be used
    again."""
    closed: list[str]
    """Those of the requests whose readers have all closed."""
    expired: list[str]
    """Those whose lease ran out."""
    revoked: list[str]
    """Those whose lease the engine has ended itself."""


class Leases:
    """All leases of an engine.

    The engine's thread adds leases and collects those that have ended; the side
    channel's opens, renews and closes them.

    Args:
        num_blocks: of its pool, the null block included.
        clock: monotonic seconds.
    """

    def __init__(self, num_blocks: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._generations = Generations(num_blocks)
        self._leases: dict[str, Lease] = {}
        """Live ones, by name."""
        self._over: list[Lease] = []
        """Ended ones that nobody has collected: until then their blocks are held."""
        self._names: dict[str, str] = {}
        """Of live and uncollected ones, by request."""
        self._holders: dict[int, int] = {}
        """How many of these hold a block."""
        self._look_at = math.inf
        """No lease runs out before."""

    # -- the engine's thread -------------------------------------------------------

    def add(
        self,
        request_id: str,
        rows: Sequence[Sequence[int]],
        num_tokens: int,
        digests: Sequence[bytes],
        seconds: float,
    ) -> str:
        """Let others read the blocks of a request that has ended.

        Args:
            request_id: it.
            rows: by group: the end of its row, as in `Granted.block_ids`.
            num_tokens: whose KV that is.
            digests: of these tokens (`kvplugin.connectors.nixl.prompt`).
            seconds: for which the lease runs, and runs again when it is renewed.

        Returns:
            The lease's name. Nobody can guess it: who knows it was told.

        Raises:
            IntegrityError: the request has one already, or names no block.
        """
        blocks = frozenset(block for row in rows for block in row if block)
        if not blocks:
            raise IntegrityError(f"a lease of request {request_id} without blocks")
        with self._lock:
            if request_id in self._names:
                raise IntegrityError(f"request {request_id} has a lease already")
            lease = Lease(
                name_for(request_id),
                request_id,
                seconds,
                Granted(
                    num_tokens=num_tokens,
                    block_ids=[list(row) for row in rows],
                    generations=[self._generations.of(row) for row in rows],
                    token_digests=list(digests),
                    seconds=seconds,
                ),
                blocks,
                self._clock() + seconds,
            )
            self._leases[lease.name] = lease
            self._names[request_id] = lease.name
            for block in blocks:
                self._holders[block] = self._holders.get(block, 0) + 1
            self._look_at = min(self._look_at, lease.deadline)
        return lease.name

    def ended(self) -> EndedLeases:
        """Leases that have ended since the last call, each once."""
        with self._lock:
            now = self._clock()
            if now >= self._look_at:
                self._expire(now)
            if not self._over:
                return EndedLeases([], [], [], [], [])
            over, self._over = self._over, []
            unheld = []
            for lease in over:
                del self._names[lease.request_id]
                unheld += self._let_go(lease.blocks)
            return EndedLeases(
                [lease.request_id for lease in over],
                self._generations.advance(sorted(unheld)),
                *(
                    [lease.request_id for lease in over if lease.end is how]
                    for how in (End.CLOSED, End.EXPIRED, End.REVOKED)
                ),
            )

    def _let_go(self, blocks: frozenset[int]) -> list[int]:
        """Those of the blocks that no lease holds any more."""
        holders = self._holders
        unheld = []
        for block in blocks:
            if holders[block] > 1:
                holders[block] -= 1
            else:
                del holders[block]
                unheld.append(block)
        return unheld

    def _expire(self, now: float) -> None:
        for lease in list(self._leases.values()):
            self._has_run_out(lease, now)
        deadlines = (lease.deadline for lease in self._leases.values())
        self._look_at = min(deadlines, default=math.inf)

    def holds(self, request_id: str) -> bool:
        """Whether `ended` has yet to name this request."""
        return request_id in self._names

    def revoke(self, block_ids: AbstractSet[int] | None = None) -> None:
        """End leases whoever reads them: all of them, or those that name one of these
        blocks. What has been read of them and not been verified is discarded."""
        with self._lock:
            for lease in list(self._leases.values()):
                if block_ids is None or not lease.blocks.isdisjoint(block_ids):
                    self._end(lease, End.REVOKED)

    def __len__(self) -> int:
        """Live leases."""
        return len(self._leases)

    @property
    def num_blocks(self) -> int:
        """Blocks that leases hold."""
        return len(self._holders)

    # -- the side channel's thread -------------------------------------------------

    def open(self, question: Open) -> Granted | Gone:
        """Let a reader read, if the lease is still there."""
        with self._lock:
            lease = self._live(question.lease)
            if lease is None:
                return Gone(reason="there is no such lease: it has ended or run out")
            if question.reader in lease.closed_by:
                return Gone(reason="this reader has closed the lease before")
            if not lease.may_remember(question.reader):
                return Gone(reason=f"it has had {MOST_READERS} readers already")
            lease.open_by.add(question.reader)
            lease.deadline = self._clock() + lease.seconds
            return lease.granted

    def renew(self, question: Renew) -> Renewed:
        """Let leases run anew, of readers that have opened and not closed them."""
        gone = []
        for name, reader in question.leases:
            with self._lock:  # for each: an engine's step is not to wait for all
                lease = self._live(name)
                if lease is None or reader not in lease.open_by:
                    gone.append(name)
                else:
                    lease.deadline = self._clock() + lease.seconds
        return Renewed(gone=gone)

    def close(self, question: Close) -> Closed:
        """A reader is done, whether it has ever begun or not."""
        with self._lock:
            lease = self._live(question.lease)
            if lease is not None:
                if lease.may_remember(question.reader):
                    lease.closed_by.add(question.reader)
                lease.open_by.discard(question.reader)
                if not lease.open_by:
                    self._end(lease, End.CLOSED)
        return Closed()

    # -- inside --------------------------------------------------------------------

    def _live(self, name: str) -> Lease | None:
        lease = self._leases.get(name)
        if lease is None or self._has_run_out(lease, self._clock()):
            return None
        return lease

    def _has_run_out(self, lease: Lease, now: float) -> bool:
        if now < lease.deadline:
            return False
        self._end(lease, End.EXPIRED)
        return True

    def _end(self, lease: Lease, how: End) -> None:
        lease.end = how
        del self._leases[lease.name]
        self._over.append(lease)

    def check(self) -> None:
        """Verify that what is held is what leases name.

        Raises:
            IntegrityError: it is not.
        """
        with self._lock:
            leases = [*self._leases.values(), *self._over]
            holders: dict[int, int] = {}
            for lease in leases:
                for block in lease.blocks:
                    holders[block] = holders.get(block, 0) + 1
                if lease.granted.generations != [
                    self._generations.of(row) for row in lease.granted.block_ids
                ]:
                    raise IntegrityError(f"a block of lease {lease.name} has changed")
            if holders != self._holders:
                raise IntegrityError("blocks are held that no lease names")
            if self._names != {lease.request_id: lease.name for lease in leases}:
                raise IntegrityError("a request has no lease, or two")
            late = [x.name for x in self._leases.values() if x.deadline < self._look_at]
            if late:
                raise IntegrityError(f"nobody looks whether {late} have run out")
