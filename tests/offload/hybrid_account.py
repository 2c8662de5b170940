"""What the scheduler half says of itself: its events and metrics, and the truth."""

from collections import Counter
from typing import Any

from kvplugin.events import MEDIUM_CPU, external_hash
from kvplugin.testing import CounterWatch, EventReplay


class Account:
    """Hears everything after each step.

    Args:
        half: an `OffloadScheduler` that makes events.
    """

    def __init__(self, half: Any) -> None:
        self.gauges: dict[str, float] = {}
        self.observed: Counter[str] = Counter()
        """Observations of each histogram."""
        self._half = half
        self._watch = CounterWatch()
        self._replay = EventReplay()

    @property
    def totals(self) -> dict[str, float]:
        """Of the counters."""
        return self._watch.totals

    def take(self) -> None:
        """News since the last call.

        Raises:
            AssertionError: a number went back, or who replays the events would think
                that something else is in host memory than is.
        """
        if (stats := self._half.take_stats()) is not None:
            self._watch.add(stats)
            self.gauges |= stats.gauges
            for name, values in stats.observations.items():
                self.observed[name] += len(values)
        self._replay.feed(self._half.take_events(), MEDIUM_CPU)
        tier = self._half._tier
        index = {
            (group, external_hash(key))
            for group, pool in tier._pool_of.items()
            for key in pool.cached_blocks(group)
        }
        assert self._replay.stored == index, "events say something else"

    def check_idle(self, tokens: int, loads: int) -> None:
        """What the numbers must say when all has ended.

        Args:
            tokens: that loads were to bring.
            loads: that were ordered.
        """
        self.take()
        ended = self.observed["load_seconds"] + self.totals.get("failed_loads", 0)
        assert self.totals.get("hits", 0) == loads == ended
        assert self.totals.get("hit_tokens", 0) == tokens
        assert self.gauges["pending_jobs"] == self.gauges["overdue_blocks"] == 0
        assert self.gauges["host_blocks_stored"] == self._half._tier.num_stored_blocks
