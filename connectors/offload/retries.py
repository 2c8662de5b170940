"""Copies into engines that cannot be told of failures are tried again."""

import itertools
import logging
from typing import Final

from kvplugin.connectors.offload.messages import CopyOrder
from kvplugin.contract import CopyJob, CopyResult

logger = logging.getLogger("vllm.kvplugin.offload")

RETRIES: Final = 3
"""Of a failed load, where the engine cannot be told that it failed."""


class Retries:
    """Which order a job of the transport is a try of."""

    def __init__(self) -> None:
        self._jobs: dict[int, tuple[CopyOrder, int]] = {}
        """By the id of the job under way, the order's or that of a retry: the order
        and how often it has been tried again."""
        self._retry_ids = itertools.count(-1, -1)

    def begin(self, order: CopyOrder) -> None:
        """The order's first job is under way."""
        self._jobs[order.id] = order, 0

    def again(self, result: CopyResult) -> CopyJob | None:
        """The job to try next after one that has ended, None if that was the last."""
        order, tries = self._jobs.get(result.id, (None, 0))
        if order is None or not result.error or tries >= RETRIES:
            return None
        logger.warning(
            "the load of request %s failed and is tried again: %s",
            order.request_id,
            result.error,
        )
        del self._jobs[result.id]
        job = copy_job(order, store=False)._replace(id=next(self._retry_ids))
        self._jobs[job.id] = order, tries + 1
        return job

    def last(self, result: CopyResult) -> CopyResult:
        """The order's result after its last job, under the order's own id."""
        order, tries = self._jobs.pop(result.id, (None, 0))
        if order is None:
            return result
        error = result.error
        if error and tries:
            error = f"in {tries + 1} tries: {error}"
        return result._replace(id=order.id, error=error)


def copy_job(order: CopyOrder, *, store: bool) -> CopyJob:
    """The transport's part of an order."""
    parts = [(part.group, part.engine_ids, part.host_ids) for part in order.parts]
    return CopyJob(order.id, store, parts)
