"""Ends of requests that the engine hears of when their stores have ended."""

from kvplugin.connectors.offload.requests import RequestState


class DelayedEnds:
    """For engines that step only as long as a request lives: one whose stores are
    under way lives until those have ended, or nobody waits for them any more."""

    def __init__(self) -> None:
        self._delayed: dict[str, RequestState] = {}
        self._due: list[str] = []

    def delay(self, state: RequestState) -> None:
        """The request has ended, some of its stores have not."""
        self._delayed[state.request.request_id] = state

    def store_ended(self, state: RequestState) -> None:
        """One store less: if it was the last one, the end is due."""
        request_id = state.request.request_id
        if not state.stores and self._delayed.get(request_id) is state:
            del self._delayed[request_id]
            self._due.append(request_id)

    @property
    def are_due(self) -> bool:
        """Whether some end is to be announced."""
        return bool(self._due)

    def take(self) -> list[str]:
        """Requests whose end is due."""
        due, self._due = self._due, []
        return due
