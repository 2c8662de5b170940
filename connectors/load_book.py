"""Loads under way on one rank, and what the engine has been told of them.

The engine hears of each load once: when it has ended, or when it is given up. Of one
that is given up it hears that it failed, though bytes may still arrive; the scheduler
half keeps the blocks from other use until it hears of the end.

An engine that cannot be told of failures hears of good ends only: a load that fails
ends the engine, which would serve wrong text otherwise. One that takes too long is
waited for.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from kvplugin.errors import TransferError


class LoadOrder(Protocol):
    """What a scheduler half orders."""

    @property
    def id(self) -> int: ...
    @property
    def request_id(self) -> str: ...
    @property
    def engine_ids(self) -> Sequence[int]:
        """All blocks of the engine that it fills."""


class LoadEnd(Protocol):
    """How it ended, as the scheduler half is told."""

    @property
    def id(self) -> int:
        """The order's."""

    @property
    def error(self) -> str:
        """Empty: every byte is where it should be."""


End = TypeVar("End", bound=LoadEnd)


@dataclass(slots=True)
class _Load(Generic[End]):
    order: LoadOrder
    given_up: bool = False
    told: bool = False
    """The engine has heard of it."""
    end: End | None = None

    @property
    def has_failed(self) -> bool:
        """As far as the engine is concerned."""
        return self.given_up or bool(self.end and self.end.error)


@dataclass(frozen=True, slots=True)
class LoadNews(Generic[End]):
    """What is new since the last time that somebody asked."""

    finished: frozenset[str]
    """Requests whose load has ended for the engine."""
    failed: Mapping[str, Sequence[int]]
    """Of these, those whose load failed, with the blocks it was to fill."""
    ends: Sequence[End]
    """Of loads that have ended, for the scheduler half."""


class LoadBook(Generic[End]):
    """Keeps account of one rank's loads.

    Args:
        can_fail: whether the engine can be told that a load failed.
        logger: of the connector.
    """

    def __init__(self, *, can_fail: bool, logger: logging.Logger) -> None:
        self._can_fail = can_fail
        self._logger = logger
        self._loads: dict[int, _Load[End]] = {}
        self._ended: list[_Load[End]] = []
        self._fatal = ""

    @property
    def is_empty(self) -> bool:
        """No load is under way."""
        return not self._loads

    @property
    def has_given_up(self) -> bool:
        """A load is under way that nobody waits for."""
        return any(load.given_up for load in self._loads.values())

    def __contains__(self, order_id: int) -> bool:
        """Whether the order is under way."""
        return order_id in self._loads

    def begin(self, order: LoadOrder) -> None:
        """The order is under way."""
        self._loads[order.id] = _Load(order)

    def give_up(self, ids: Collection[int]) -> None:
        """The engine must not wait for these orders any longer."""
        for load in (*self._loads.values(), *self._ended):
            if load.order.id in ids:
                load.given_up = True
                if not self._can_fail:
                    self._logger.error(
                        "the load of request %s does not end, and this engine cannot "
                        "be told so: it waits",
                        load.order.request_id,
                    )

    def refuse(self, order: LoadOrder, end: End) -> None:
        """The order ends before it has begun."""
        self._end(_Load(order), end)

    def end(self, end: End) -> None:
        """An order has ended; of one that is not under way nothing is noted."""
        load = self._loads.pop(end.id, None)
        if load is not None:
            self._end(load, end)

    def _end(self, load: _Load[End], end: End) -> None:
        load.end = end
        self._ended.append(load)
        if end.error and not self._can_fail:
            self._fatal = self._fatal or _why_fatal(load.order, end.error)

    def news(self) -> LoadNews[End] | None:
        """What the engine and the scheduler half are to be told now.

        Raises:
            TransferError: a load failed of which the engine cannot be told.
        """
        if self._fatal:
            raise TransferError(self._fatal)
        ended, self._ended = self._ended, []
        overdue = [load for load in self._loads.values() if load.given_up]
        heard = [*ended, *(overdue if self._can_fail else ())]
        untold = [load for load in heard if not load.told]
        if not (ended or untold):
            return None
        for load in untold:
            load.told = True
        failed = [load for load in untold if self._can_fail and load.has_failed]
        return LoadNews(
            frozenset(load.order.request_id for load in untold),
            {load.order.request_id: load.order.engine_ids for load in failed},
            [load.end for load in ended if load.end is not None],
        )


def _why_fatal(order: LoadOrder, error: str) -> str:
    return (
        f"the load of request {order.request_id} failed ({error}), and this engine "
        "cannot be told so: a newer vLLM, or the scheduler_cls "
        "kvplugin.integration.vllm.scheduler.KVPluginScheduler, would recover"
    )
