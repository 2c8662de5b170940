"""Loads under way on one rank, and what the engine has been told of them.

The engine hears of each load once: when it has ended, or when it is given up. Of one
that is given up it hears that it failed, though bytes may still arrive; the scheduler
half keeps the blocks from other use until it hears of the end.

An engine that cannot be told of failures hears of good ends only: a failed copy is
tried again, and what still fails then ends the engine, which would serve wrong text
otherwise. One that takes too long is waited for.
"""

import itertools
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvplugin.connectors.offload.messages import Completion, CopyOrder
from kvplugin.contract import CopyJob, CopyResult
from kvplugin.errors import TransferError

logger = logging.getLogger("vllm.kvplugin.offload")

RETRIES: Final = 3
"""Of a failed load, where the engine cannot be told that it failed."""


@dataclass(slots=True)
class _Load:
    order: CopyOrder
    retries: int = 0
    given_up: bool = False
    told: bool = False
    """The engine has heard of it."""
    result: CopyResult | None = None
    """How it ended."""

    @property
    def has_failed(self) -> bool:
        """As far as the engine is concerned."""
        return self.given_up or bool(self.result and self.result.error)


@dataclass(frozen=True, slots=True)
class LoadNews:
    """What is new since the last time that somebody asked."""

    finished: frozenset[str]
    """Requests whose load has ended for the engine."""
    failed: Mapping[str, Sequence[int]]
    """Of these, those whose load failed, with the blocks it was to fill."""
    completions: Sequence[Completion]
    """Jobs that have ended, for the scheduler half."""


class LoadBook:
    """Keeps account of one rank's loads.

    Args:
        can_fail: whether the engine can be told that a load failed.
    """

    def __init__(self, *, can_fail: bool) -> None:
        self._can_fail = can_fail
        self._loads: dict[int, _Load] = {}
        """By the id of the job under way: the order's, or that of a retry."""
        self._ended: list[_Load] = []
        self._retry_ids = itertools.count(-1, -1)
        self._fatal = ""

    @property
    def is_empty(self) -> bool:
        """No copy is under way."""
        return not self._loads

    @property
    def has_given_up(self) -> bool:
        """A copy is under way that nobody waits for."""
        return any(load.given_up for load in self._loads.values())

    def begin(self, order: CopyOrder) -> None:
        """A job of the order's id is under way."""
        self._loads[order.id] = _Load(order)

    def give_up(self, ids: Collection[int]) -> None:
        """The engine must not wait for these orders any longer."""
        for load in (*self._loads.values(), *self._ended):
            if load.order.id in ids:
                load.given_up = True
                if not self._can_fail:
                    logger.error(
                        "the load of request %s does not end, and this engine cannot "
                        "be told so: it waits",
                        load.order.request_id,
                    )

    def refuse(self, order: CopyOrder, reason: str) -> None:
        """The order ends without a copy."""
        load = _Load(order)
        self._end(load, CopyResult(order.id, error=reason))

    def end(self, result: CopyResult) -> CopyJob | None:
        """A job has ended; of one that is not under way nothing is noted.

        Returns:
            What is to be tried again.
        """
        load = self._loads.pop(result.id, None)
        if load is None:
            return None
        if result.error and not self._can_fail and load.retries < RETRIES:
            load.retries += 1
            logger.warning(
                "the load of request %s failed and is tried again: %s",
                load.order.request_id,
                result.error,
            )
            retry = copy_job(load.order, store=False)._replace(id=next(self._retry_ids))
            self._loads[retry.id] = load
            return retry
        self._end(load, result)
        return None

    def _end(self, load: _Load, result: CopyResult) -> None:
        load.result = result
        self._ended.append(load)
        if result.error and not self._can_fail:
            self._fatal = self._fatal or _why_fatal(load, result.error)

    def news(self) -> LoadNews | None:
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
            [completion(load.order.id, load.result) for load in ended if load.result],
        )


def copy_job(order: CopyOrder, *, store: bool) -> CopyJob:
    """The transport's part of an order."""
    parts = [(part.group, part.engine_ids, part.host_ids) for part in order.parts]
    return CopyJob(order.id, store, parts)


def completion(job_id: int, result: CopyResult) -> Completion:
    """The scheduler half's part of a result."""
    return Completion(job_id, result.error, result.nbytes, result.seconds)


def _why_fatal(load: _Load, error: str) -> str:
    tries = f" in {load.retries + 1} tries" if load.retries else ""
    return (
        f"the load of request {load.order.request_id} failed{tries} ({error}), and "
        "this engine cannot be told so: a newer vLLM, or the scheduler_cls "
        "kvplugin.integration.vllm.scheduler.KVPluginScheduler, would recover"
    )
