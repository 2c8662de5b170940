"""Orders of the waiting queue other than arrival and priority."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final

import msgspec

from kvplugin.errors import check_ranges
from kvplugin.hooks import WaitingContext, hookimpl
from kvplugin.policies.scheduling.aging import Aging
from kvplugin.request import RequestLike

_RANGES: Final = {"most_steps": (1, 2**31), "window": (1, 2**16)}


class OrderOptions(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """Options of `CachedFirst` and `ShortestFirst`."""

    most_steps: int = 256
    """Steps after which a request that waits goes first, whatever the policy says;
    counted since it first waited."""
    window: int = 64
    """Requests that are looked at in a step, the first ones of the scheduler's own
    order; each costs a lookup."""

    def __post_init__(self) -> None:
        check_ranges(self, _RANGES)


CachedFirstOptions = ShortestFirstOptions = OrderOptions


class _Ranked(ABC):
    """The best of the first requests go first, unless somebody has waited too long."""

    def __init__(self, options: OrderOptions) -> None:
        self._aging = Aging(options.most_steps)
        self._window = options.window

    @hookimpl
    def kvp_choose_waiting_order(self, ctx: WaitingContext) -> list[str]:
        """The first ones; those behind the window keep their order."""
        late, others = self._aging.overdue(ctx.waiting, ctx.step)
        first = others[: self._window]
        first.sort(key=lambda request: self._badness(request, ctx.cached_tokens))
        return [request.request_id for request in (*late, *first)]

    @abstractmethod
    def _badness(
        self, request: RequestLike, cached_tokens: Callable[[RequestLike], int]
    ) -> float:
        """Less goes first."""


class CachedFirst(_Ranked):
    """Requests of which a longer share is cached go first: they are soon done, and
    what they hit is still there. As in SGLang's longest-prefix-match scheduling
    (Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs",
    2024), with a bound on waiting, which that lacks."""

    def _badness(
        self, request: RequestLike, cached_tokens: Callable[[RequestLike], int]
    ) -> float:
        return -cached_tokens(request) / request.num_tokens


class ShortestFirst(_Ranked):
    """Requests with fewer tokens left to compute go first: shortest job first, by what
    is known of the length of a job. A mean wait as short as can be, at the cost of
    long prompts, which the bound limits."""

    def _badness(
        self, request: RequestLike, cached_tokens: Callable[[RequestLike], int]
    ) -> float:
        return request.num_tokens - cached_tokens(request)
