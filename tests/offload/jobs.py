"""What a test holds in its hands: the copies of all ranks, and the connector's
numbers."""

import itertools
from collections import Counter
from collections.abc import Sequence

from kvplugin.contract import CopyJob, Stats
from kvplugin.testing.transport import FakeTransport


class Jobs:
    """The fake transports of all ranks, for tests that treat them alike."""

    def __init__(self, transports: Sequence[FakeTransport]) -> None:
        self._transports = transports

    def hold(self) -> None:
        """From now on, a job ends only when the test says so."""
        for transport in self._transports:
            transport.held = True

    def let_go(self) -> None:
        """From now on, jobs end as soon as anybody asks; those held as well."""
        for transport in self._transports:
            transport.held = False

    @property
    def stores(self) -> list[CopyJob]:
        """Stores under way on the first rank, oldest first."""
        return [job for job in self._transports[0].pending if job.store]

    @property
    def loads(self) -> list[CopyJob]:
        """Loads under way on the first rank, oldest first."""
        return [job for job in self._transports[0].pending if not job.store]

    @property
    def all_stores(self) -> list[CopyJob]:
        """Stores that the first rank has ever started, oldest first."""
        return [job for job in self._transports[0].submitted if job.store]

    @property
    def all_loads(self) -> list[CopyJob]:
        """Loads that the first rank has ever started, oldest first."""
        return [job for job in self._transports[0].submitted if not job.store]

    def complete(self, *jobs: CopyJob) -> None:
        """End jobs well on every rank."""
        for transport, job in itertools.product(self._transports, jobs):
            transport.complete(job.id)

    def fail(self, *jobs: CopyJob) -> None:
        """End jobs badly on every rank, without a byte moved."""
        for transport, job in itertools.product(self._transports, jobs):
            transport.fail(job.id)

    def tear(self, job: CopyJob, blocks: int) -> None:
        """End a job badly on every rank, after its first `blocks` blocks."""
        for transport in self._transports:
            transport.tear(job.id, blocks)


def blocks_of(job: CopyJob) -> list[int]:
    """The engine blocks of a job."""
    return [block for _, engine_ids, _ in job.parts for block in engine_ids]


class Totals:
    """A connector's metrics since the start."""

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()
        self.gauges: dict[str, float] = {}
        self.observations: dict[str, list[float]] = {}

    def add(self, stats: Stats) -> None:
        """One more snapshot.

        Raises:
            AssertionError: a number is negative.
        """
        for name, amount in stats.counters.items():
            assert amount >= 0, f"{name} went back"
            self.counters[name] += int(amount)
        for name, value in stats.gauges.items():
            assert value >= 0, f"{name} is negative"
        self.gauges |= stats.gauges
        for name, values in stats.observations.items():
            assert min(values) >= 0, f"{name} is negative"
            self.observations.setdefault(name, []).extend(values)
