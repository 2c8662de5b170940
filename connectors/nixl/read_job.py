"""One order on one rank, from its plan to its completion.

    for each batch: read, then convert what was staged
    read the peer's generations, compare                    -> only now it is ok

Written as a generator: it yields whenever it waits, so that one thread has several
under way.
"""

from collections.abc import Callable, Generator, Sequence
from typing import TypeAlias

from kvplugin.connectors.nixl.connection import Connection
from kvplugin.connectors.nixl.messages import Completion, ReadOrder
from kvplugin.connectors.nixl.readers import Read
from kvplugin.connectors.nixl.reads import Batch, Transfer
from kvplugin.connectors.nixl.staging import Slice, Staging
from kvplugin.errors import TransferError

Waiting: TypeAlias = Generator[bool, None, None]
"""Yields True where it can go on at once, False where it waits for others."""


class ReadJob:
    """A read order under way.

    Args:
        order: what to read.
        connection: to its peer.
        staging: this rank's.
        is_unwanted: says whether the order may end early.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        order: ReadOrder,
        connection: Connection,
        staging: Staging,
        is_unwanted: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self.order = order
        self._connection = connection
        self._staging = staging
        self._is_unwanted = is_unwanted
        self._clock = clock
        self._nbytes = 0
        self._is_discarded = False

    def run(self) -> Generator[bool, None, Completion]:
        """Do it; what goes wrong is the completion's error."""
        started = self._clock()
        error = ""
        place = self._connection.take_place()
        try:
            self._connection.check(self.order)
            ranks = yield from self._read()
            yield from self._verify(ranks, place)
        except Exception as caught:
            error = str(caught) or type(caught).__name__
        finally:
            self._connection.give_back(place)
        seconds = self._clock() - started
        return Completion(
            self.order.id, error, self._nbytes, seconds, self._is_discarded
        )

    def _read(self) -> Generator[bool, None, list[int]]:
        """Fill the order's blocks; the peer's ranks that were read."""
        batches = self._connection.plan(self.order, self._staging.first)
        taken: Slice | None = None
        if any(batch.conversions for batch in batches):
            taken = yield from self._take_slice()
            if taken.number != self._staging.first.number:
                batches = self._connection.plan(self.order, taken)
        try:
            for batch in batches:
                yield from self._read_batch(batch, taken)
        finally:
            if taken is not None:
                self._staging.give_back(taken)
        return sorted({t.remote_rank for batch in batches for t in batch.transfers})

    def _take_slice(self) -> Generator[bool, None, Slice]:
        while (taken := self._staging.take()) is None:
            self._go_on()
            yield False
        return taken

    def _read_batch(self, batch: Batch, taken: Slice | None) -> Waiting:
        yield from self._transfer(batch.transfers)
        self._nbytes += sum(int(t.nbytes.sum()) for t in batch.transfers)
        if taken is not None:
            self._connection.convert(batch.conversions, taken)

    def _verify(self, ranks: Sequence[int], place: int) -> Waiting:
        for check in self._connection.checks(self.order, ranks, place):
            yield from self._transfer([check.transfer])
            if difference := check.difference():
                self._is_discarded = True
                raise TransferError(difference)

    def _transfer(self, transfers: Sequence[Transfer]) -> Waiting:
        """All of these, to their ends: also where one fails or nobody wants them any
        more, as nothing may be said of blocks that are still written.

        Raises:
            TransferError: one has failed.
        """
        self._go_on()
        reads: list[Read] = []
        error = ""
        try:
            for transfer in transfers:
                reads.append(self._connection.begin(transfer))
        except Exception as caught:
            error = str(caught)
        while True:
            left = []
            for read in reads:
                if error or self._is_unwanted():
                    read.stop()
                try:
                    is_there = read.poll()
                except Exception as caught:
                    error = error or str(caught) or type(caught).__name__
                    continue
                if not is_there:
                    left.append(read)
            if not left:
                break
            yield len(left) < len(reads) or any(read.is_prompt for read in left)
            reads = left
        if error:
            raise TransferError(error)

    def _go_on(self) -> None:
        if self._is_unwanted():
            raise TransferError("nobody waits for it any more")
