"""What the scheduler's own setting, fcfs or priority, says where no policy is named."""

from collections.abc import Sequence
from typing import Protocol, TypeVar


class Ranked(Protocol):
    """What requests are ranked by; `RequestLike` has it."""

    @property
    def priority(self) -> int: ...
    @property
    def arrival_time(self) -> float: ...


T = TypeVar("T", bound=Ranked)


def rank_of(request: Ranked) -> tuple[int, float]:
    """Smaller goes first under the priority policy."""
    return request.priority, request.arrival_time


def last_in_order(running: Sequence[T], policy: str) -> T:
    """Which of these requests loses its blocks first: the one admitted last, or under
    the priority policy the one that would be.

    Args:
        running: in the order of their admission, one or more. Among equals the last
            one is taken, or they would take turns at losing what they have computed
            (vLLM 0.19.1 takes the first).
        policy: fcfs or priority.
    """
    return max(reversed(running), key=rank_of) if policy == "priority" else running[-1]
