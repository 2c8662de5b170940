"""vLLM's waiting queue, with an order and a gate that somebody else chooses."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol


class RequestQueue(Protocol):
    """What vLLM's queues have, and whatever stands in for one; see there."""

    def add_request(self, request: Any) -> None: ...
    def pop_request(self) -> Any: ...
    def peek_request(self) -> Any: ...
    def prepend_request(self, request: Any) -> None: ...
    def prepend_requests(self, requests: Any) -> None: ...
    def remove_request(self, request: Any) -> None: ...
    def remove_requests(self, requests: Any) -> None: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Any]: ...


class Listener(Protocol):
    """Hears who waits; a request that is skipped in a step leaves and comes back."""

    def add(self, request: Any) -> None:
        """It waits from now on."""

    def remove(self, request: Any) -> None:
        """It waits no longer, if it did: vLLM also removes requests that run."""


class SteeredQueue:
    """Stands in for a scheduler's `waiting`.

    vLLM's own queue keeps the requests and the base order. A step may be given
    another one for the requests that wait then; it ends with the step, or when one of
    them is removed. The truth value says whether the next request may be admitted; the
    length is always the true one.

    Args:
        base: vLLM's queue.
        listener: hears who joins and who leaves.
        admits: whether a request may be admitted now, if it is the next.
    """

    def __init__(
        self,
        base: RequestQueue,
        listener: Listener,
        admits: Callable[[Any], bool],
    ) -> None:
        self._base = base
        self._listener = listener
        self._admits = admits
        self._order: deque[Any] = deque()
        # Popped by the step's order and still in the base queue: taking each out of
        # it at once would cost its length every time.
        self._popped: set[Any] = set()
        for request in base:
            listener.add(request)

    def choose_order(self, requests: Iterable[Any]) -> None:
        """Let a step begin with these, each of which waits, in this order."""
        self._settle()
        self._order = deque(requests)

    def pop_request(self) -> Any:
        request = self.peek_request()
        if self._order:
            self._order.popleft()
            self._popped.add(request)
        else:
            self._base.pop_request()
        self._listener.remove(request)
        return request

    def peek_request(self) -> Any:
        if self._order:
            return self._order[0]
        self._settle()
        return self._base.peek_request()

    def add_request(self, request: Any) -> None:
        self._settle()
        self._base.add_request(request)
        self._listener.add(request)

    def prepend_request(self, request: Any) -> None:
        self._settle()
        self._base.prepend_request(request)
        self._listener.add(request)

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        requests = list(requests)
        self._settle()
        self._base.prepend_requests(requests)
        for request in requests:
            self._listener.add(request)

    def remove_request(self, request: Any) -> None:
        self.remove_requests([request])

    def remove_requests(self, requests: Iterable[Any]) -> None:
        self._settle()
        self._order.clear()
        requests = set(requests)
        self._base.remove_requests(requests)
        for request in requests:
            self._listener.remove(request)

    def __bool__(self) -> bool:
        return len(self) > 0 and self._admits(self.peek_request())

    def __len__(self) -> int:
        return len(self._base) - len(self._popped)

    def __iter__(self) -> Iterator[Any]:
        """In the base order."""
        self._settle()
        return iter(self._base)

    def _settle(self) -> None:
        """Take what was popped out of the base queue."""
        if self._popped:
            self._base.remove_requests(self._popped)
            self._popped = set()
