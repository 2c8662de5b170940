"""Aging: nobody is passed over for ever."""

from collections.abc import Sequence
from typing import Final

from kvplugin.request import RequestLike

MOST_AWAY: Final = 10_000
"""Requests that do not wait and whose first step is remembered, those that waited
last; others begin to age anew."""


class Aging:
    """Since when requests wait, in steps. A preemption does not begin it anew. O(those
    that wait) a step.

    Args:
        most_steps: a request that first waited so many steps ago goes first, before
            others the one that has waited longest.
    """

    def __init__(self, most_steps: int) -> None:
        self._most = most_steps
        self._since: dict[str, int] = {}
        self._away: dict[str, int] = {}
        """Of requests that waited and do not now; they may have ended."""

    def overdue(
        self, waiting: Sequence[RequestLike], step: int
    ) -> tuple[list[RequestLike], list[RequestLike]]:
        """Requests whose turn has come, in the order of their first step, and the
        others in theirs.

        Args:
            waiting: all that wait.
            step: number of this step.
        """
        known, due = self._since, step - self._most
        since: dict[str, int] = {}
        late: list[RequestLike] = []
        others: list[RequestLike] = []
        for request in waiting:
            id_ = request.request_id
            first = known.pop(id_, None)
            if first is None:
                first = self._came_back(request, step)
            since[id_] = first
            (late if first <= due else others).append(request)
        self._since = since
        self._away.update(known)
        while len(self._away) > MOST_AWAY:
            del self._away[next(iter(self._away))]
        late.sort(key=lambda request: since[request.request_id])
        return late, others

    def _came_back(self, request: RequestLike, step: int) -> int:
        """First step of a request that did not wait in the last one. Who was never
        preempted is new, though its id may not be."""
        first = self._away.pop(request.request_id, step)
        return first if request.num_preemptions else step
