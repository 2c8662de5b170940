"""Aging: nobody is passed over for ever."""

from collections.abc import Sequence

from kvplugin.request import RequestLike


class Aging:
    """Since when requests wait, in steps.

    Args:
        most_steps: a request that has waited for so many goes first, before others
            the one that has waited longest.
    """

    def __init__(self, most_steps: int) -> None:
        self._most = most_steps
        self._since: dict[str, int] = {}

    def overdue(
        self, waiting: Sequence[RequestLike], step: int
    ) -> tuple[list[RequestLike], list[RequestLike]]:
        """Requests whose turn has come, in the order of their first step, and the
        others in theirs.

        Args:
            waiting: all that wait; who is not among them is forgotten.
            step: number of this step.
        """
        known = self._since
        self._since = {r.request_id: known.get(r.request_id, step) for r in waiting}
        due = step - self._most
        late = [r for r in waiting if self._since[r.request_id] <= due]
        late.sort(key=lambda r: self._since[r.request_id])
        others = [r for r in waiting if self._since[r.request_id] > due]
        return late, others
