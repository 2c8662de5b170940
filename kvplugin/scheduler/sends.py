"""Sends: blocks of ended requests that a connector still reads.

The connector has asked for it (`SchedulerHalf.finished`) and announces the end itself,
once a rank.
"""

from collections.abc import Sequence

from kvplugin.scheduler.holds import Holds


class Sends:
    """All sends that some rank has not announced the end of.

    Args:
        holds: keeps the blocks.
        num_ranks: announcements that end a send.
    """

    def __init__(self, holds: Holds, num_ranks: int) -> None:
        self._holds = holds
        self._num_ranks = num_ranks
        self._waiting_for: dict[str, set[int]] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting_for

    def start(self, request_id: str, rows: Sequence[Sequence[int]]) -> None:
        """A request has ended, and these rows of it, still in use, are to be sent."""
        self._holds.hold(("send", request_id), rows)
        self._waiting_for[request_id] = set(range(self._num_ranks))

    def reported(self, rank: int, request_id: str) -> None:
        """A rank says that its part has ended; again, or of no send, means nothing."""
        left = self._waiting_for.get(request_id, set())
        left.discard(rank)
        if not left and self._waiting_for.pop(request_id, None) is not None:
            self._holds.release(("send", request_id))
