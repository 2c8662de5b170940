"""Shares of a baseline, on machines whose speed wanders while one measures."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

Work = Callable[[], int]
"""Does something once and returns how many bytes it moved."""


class Speed(NamedTuple):
    """Medians over the repeats."""

    bytes_per_second: float
    share: float
    """Of the baseline's speed; 1.0 is as fast."""


def speeds(baseline: Work, works: Mapping[str, Work], repeats: int) -> dict[str, Speed]:
    """Time works in turn, each right after the baseline that it is compared with.

    Every repeat goes through all works, so that a slow spell hits them alike. One
    round before the first is not counted.
    """
    rates: dict[str, list[float]] = {name: [] for name in works}
    shares: dict[str, list[float]] = {name: [] for name in works}
    for repeat in range(repeats + 1):
        for name, work in works.items():
            base = _rate(baseline)
            rate = _rate(work)
            if repeat:
                rates[name].append(rate)
                shares[name].append(rate / base)
    return {
        name: Speed(statistics.median(rates[name]), statistics.median(shares[name]))
        for name in works
    }


def _rate(work: Work) -> float:
    start = time.perf_counter()
    nbytes = work()
    return nbytes / (time.perf_counter() - start)
