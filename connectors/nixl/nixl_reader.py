"""Reads of one rank through NIXL."""

from collections.abc import Iterator
from typing import Final

from kvplugin.connectors.nixl.agent import NixlAgent, Posted, agent_name
from kvplugin.connectors.nixl.descriptor import RankDescriptor
from kvplugin.connectors.nixl.reads import Transfer
from kvplugin.errors import TransferError

POST_PIECES: Final = 2048
POST_BYTES: Final = 64 << 20
"""Of one post, some 40 ms at most where it copies: meanwhile no other thread can post,
and nothing can stop it."""


class NixlReader:
    """Implements `kvplugin.connectors.nixl.readers.Reader`.

    After a failed read the connection is made anew, as NIXL never tries that by
    itself, once no other read of the rank is active.

    Args:
        agent: ours.
        theirs: the rank.

    Raises:
        TransferError: its metadata is not that of an agent of this rank.
    """

    minds_pieces = True

    def __init__(self, agent: NixlAgent, theirs: RankDescriptor) -> None:
        self._agent = agent
        self._name = agent_name(theirs.rank, theirs.incarnation)
        self._metadata = theirs.agent_metadata
        self._posted: list[Posted] = []
        self._is_broken = False
        agent.add_peer(self._metadata, self._name)

    def begin(self, transfer: Transfer) -> "NixlRead":
        """A read, of which nothing is posted before it is polled."""
        return NixlRead(self, transfer)

    def post(self, transfer: Transfer, first: int, last: int) -> Posted:
        """Post some of its pieces.

        Raises:
            TransferError: they are not under way.
        """
        self._mend()
        try:
            posted = self._agent.post(
                self._name,
                transfer.remote[first:last],
                transfer.local[first:last],
                transfer.nbytes[first:last],
                (transfer.remote_device, transfer.local_device),
            )
        except TransferError:
            self._is_broken = True
            raise
        self._posted.append(posted)
        return posted

    def _mend(self) -> None:
        self._is_broken |= any(posted.has_failed for posted in self._posted)
        self._posted = [posted for posted in self._posted if posted.is_active]
        if self._is_broken and not self._posted:
            self._agent.remove_peer(self._name)
            self._agent.add_peer(self._metadata, self._name)
            self._is_broken = False

    def close(self) -> None:
        """Forget the rank, unless a transfer would be left behind."""
        if not any(posted.is_active for posted in self._posted):
            self._agent.remove_peer(self._name)


class NixlRead:
    """Implements `kvplugin.connectors.nixl.readers.Read`: posts of bounded size, each
    as soon as the one before has been posted."""

    def __init__(self, reader: NixlReader, transfer: Transfer) -> None:
        self._reader = reader
        self._transfer = transfer
        self._cuts = _cuts(transfer)
        self._next = next(self._cuts, None)
        self._active: list[Posted] = []
        self._error = ""

    @property
    def is_prompt(self) -> bool:
        """Something is left to post."""
        return self._next is not None

    def stop(self) -> None:
        """Post nothing more; NIXL can't stop what it was given."""
        self._fail("stopped")

    def poll(self) -> bool:
        """Post on, and look at what was posted.

        Raises:
            TransferError: it has failed, and nothing is written any more.
        """
        if self._next is not None:
            try:
                self._active.append(self._reader.post(self._transfer, *self._next))
                self._next = next(self._cuts, None)
            except TransferError as error:
                self._fail(str(error))
        self._active = [posted for posted in self._active if self._goes_on(posted)]
        if self._active or self._next is not None:
            return False
        if self._error:
            raise TransferError(self._error, retryable=True)
        return True

    def _goes_on(self, posted: Posted) -> bool:
        try:
            return not posted.poll()
        except TransferError as error:
            self._fail(str(error))
            return False

    def _fail(self, error: str) -> None:
        if not self._error and (self._active or self._next is not None):
            self._error = error
        self._next = None


def _cuts(transfer: Transfer) -> Iterator[tuple[int, int]]:
    """First and last piece of each post."""
    first, nbytes = 0, 0
    for place, size in enumerate(transfer.nbytes.tolist()):
        if place > first and (
            place - first == POST_PIECES or nbytes + size > POST_BYTES
        ):
            yield first, place
            first, nbytes = place, 0
        nbytes += size
    if first < len(transfer.nbytes):
        yield first, len(transfer.nbytes)
