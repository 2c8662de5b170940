"""A transport whose jobs end exactly when, and how, a test says.

The faults of offload live in the time between the start of a transfer and the
report of its end: a source that is reused too early, a report that comes late,
twice or never, a target that is half written. Against real copies such a test needs
luck; here it needs one line. Give each worker half a `FakeTransport` in place of its
own transport and drive both halves through `kvplugin.contract`:

    transport = FakeTransport(lambda job: move(job, engine_memory, host_memory))
    worker = OffloadWorker(engine, config, make_transport=lambda pools: transport)

    transport.held = True                    # from here on, nothing ends by itself
    ...                                      # steps in which the worker starts a store
    (store,) = transport.pending
    ...                                      # what must not matter: reuse the blocks
    transport.complete(store.id)             # now the bytes move; `poll` will say so

What moving means is the test's: `execute` gets the job and returns the bytes moved.
It runs when the job is executed, not when it is submitted, and so reads what its
source holds at that late time: content that a source lost too early is lost in the
copy as well.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kvplugin.contract import CopyJob, CopyResult
from kvplugin.errors import IntegrityError


@dataclass(slots=True)
class _Pending:
    """A job under way; `moved` once its bytes are there but nobody knows."""

    job: CopyJob
    moved: int | None = None


class FakeTransport:
    """Implements `kvplugin.contract.Transport` without a thread and without a wait.

    While `held` is false, each `poll` first completes what was submitted, in that
    order: a transport that is as fast as can be. While it is true, a job ends by
    `complete`, `fail` or `tear` alone.

    Args:
        execute: moves the blocks of a job and returns the bytes moved; what it
            raises becomes the error of the job's result, but for an
            `AssertionError`, which is the test's own and ends it. The attribute of
            the same name may be changed at any time.
        held: whether jobs wait for the test from the start.
    """

    def __init__(
        self, execute: Callable[[CopyJob], int], *, held: bool = False
    ) -> None:
        self.held = held
        self.submitted: list[CopyJob] = []
        """Every job there ever was, oldest first."""
        self.waits: list[float] = []
        """Seconds that each `poll` was ready to wait."""
        self.execute = execute
        self._pending: dict[int, _Pending] = {}
        self._ended: dict[int, CopyResult] = {}
        self._unpolled: list[CopyResult] = []
        self._closed = False

    # -- what a worker half calls --------------------------------------------------

    def submit(self, job: CopyJob) -> None:
        """Take a job; moves nothing.

        Raises:
            IntegrityError: the transport is closed, or has seen a job of this id.
        """
        if self._closed:
            raise IntegrityError(f"job {job.id} came after the end of the transport")
        if job.id in self._pending or job.id in self._ended:
            raise IntegrityError(f"job {job.id} was submitted twice")
        self.submitted.append(job)
        self._pending[job.id] = _Pending(job)

    def poll(self, wait: float) -> list[CopyResult]:
        """Results since the last call; notes `wait` and never does."""
        self.waits.append(wait)
        if not self.held:
            self.complete_all()
        results, self._unpolled = self._unpolled, []
        return results

    def close(self) -> None:
        """Complete what is under way; from now on a job is an error."""
        self.complete_all()
        self._closed = True

    # -- what a test calls ---------------------------------------------------------

    @property
    def pending(self) -> list[CopyJob]:
        """Jobs that have not ended, oldest first."""
        return [pending.job for pending in self._pending.values()]

    @property
    def ended(self) -> list[int]:
        """Ids of jobs that have ended, first to end first."""
        return list(self._ended)

    def move(self, job_id: int) -> None:
        """Move the bytes but say nothing yet: the report of the job is late until
        `complete` or `fail`. Once moved, further calls do nothing."""
        pending = self._pending[job_id]
        if pending.moved is None:
            pending.moved = self.execute(pending.job)

    def complete(self, job_id: int) -> None:
        """Move the bytes, if they have not moved yet, and end the job with what
        came of it."""
        try:
            self.move(job_id)
        except AssertionError:
            raise
        except Exception as error:
            self.fail(job_id, f"{type(error).__name__}: {error}")
        else:
            nbytes = self._pending[job_id].moved or 0
            self._end(CopyResult(job_id, nbytes=nbytes))

    def complete_all(self) -> None:
        """`complete` every job under way, oldest first."""
        for job_id in list(self._pending):
            self.complete(job_id)

    def fail(self, job_id: int, error: str = "failed by the test") -> None:
        """End the job with an error; moves nothing."""
        self._end(CopyResult(job_id, error=error))

    def tear(self, job_id: int, blocks: int, error: str = "torn by the test") -> None:
        """Move the first `blocks` blocks of the job, then end it with an error: a
        short write, or a copy that broke off.

        What `execute` is given has the job's id and its leading blocks only.
        """
        job = self._pending[job_id].job
        self.execute(_head(job, blocks))
        self.fail(job_id, error)

    def release(self) -> None:
        """From now on every job ends by itself, held ones at the next `poll`."""
        self.held = False

    def state(self) -> object:
        """What the jobs under way will do: a part of the state of a run."""
        return self.held, [(id_, p.moved) for id_, p in self._pending.items()]

    def repeat(self, job_id: int) -> None:
        """Say once more how a job has ended: its result comes twice."""
        self._unpolled.append(self._ended[job_id])

    def _end(self, result: CopyResult) -> None:
        del self._pending[result.id]
        self._ended[result.id] = result
        self._unpolled.append(result)


def _head(job: CopyJob, blocks: int) -> CopyJob:
    """The job cut after its first `blocks` blocks, over its groups in order."""
    parts = []
    for group, engine_ids, tier_ids in job.parts:
        taken = min(blocks, len(engine_ids))
        if taken:
            parts.append((group, engine_ids[:taken], tier_ids[:taken]))
        blocks -= taken
    return job._replace(parts=parts)
