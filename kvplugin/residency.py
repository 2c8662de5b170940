"""How long blocks live and how often they are used again, by sample."""

import random
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

from kvplugin.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Residency:
    """The life of one sampled block, told when it is evicted. Times in seconds."""

    lifetime_seconds: float
    idle_seconds: float
    """Since its last use."""
    reuse_gaps_seconds: tuple[float, ...]
    """Between its last uses, at most three gaps."""


class ResidencySampler:
    """Follows a share of the blocks from allocation to eviction.

    The quantities are those of vLLM 0.19.1's `KVCacheMetricsCollector`.

    Args:
        sample_rate: share of allocated blocks to follow, in (0, 1].
        clock: seconds.
        chance: a random number in [0, 1).

    Raises:
        ConfigError: the rate is outside (0, 1].
    """

    def __init__(
        self,
        sample_rate: float = 0.01,
        *,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        if not 0 < sample_rate <= 1:
            raise ConfigError(f"sample_rate must be in (0, 1], got {sample_rate}")
        self._rate = sample_rate
        self._clock = clock
        self._chance = chance
        self._born: dict[int, float] = {}
        self._uses: dict[int, deque[float]] = {}
        self._ended: list[Residency] = []

    def allocated(self, ids: Iterable[int]) -> None:
        """Blocks got a new life; a sample of them is followed."""
        for block in ids:
            if self._chance() < self._rate:
                self._born[block] = self._clock()
                self._uses[block] = deque(maxlen=4)

    def used(self, ids: Iterable[int]) -> None:
        """Blocks were hit."""
        if not self._born:
            return
        for block in ids:
            if block in self._uses:
                self._uses[block].append(self._clock())

    def evicted(self, ids: Iterable[int]) -> None:
        """Blocks lost their content or are about to."""
        if not self._born:
            return
        for block in ids:
            if block in self._born:
                self._end(block)

    def _end(self, block: int) -> None:
        born = self._born.pop(block)
        uses = list(self._uses.pop(block))
        now = self._clock()
        gaps = tuple(later - earlier for earlier, later in pairwise(uses))
        last = uses[-1] if uses else born
        self._ended.append(Residency(now - born, now - last, gaps))

    def reset(self) -> None:
        """Forget the blocks followed and what was not taken."""
        self._born.clear()
        self._uses.clear()
        self._ended.clear()

    def take(self) -> list[Residency]:
        """Lives that ended since the last call, oldest first."""
        ended, self._ended = self._ended, []
        return ended
