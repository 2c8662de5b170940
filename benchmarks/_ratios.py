"""Ratios of two ways to do the same work, taken in pairs, with their intervals."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

Measure = Callable[[int], Mapping[str, float]]
"""Does the work of the pair with this number and returns what it cost, by name."""

LEAST_PAIRS = 6
"""With fewer no interval holds the median in 95 % of all cases."""


class Interval(NamedTuple):
    """A median and where it lies with 95 % confidence."""

    low: float
    median: float
    high: float
    pairs: int

    @property
    def width(self) -> float:
        return self.high - self.low


def median_interval(values: Sequence[float]) -> Interval:
    """The median and its 95 % interval, of any distribution.

    The interval is two of the values: the k-th smallest and the k-th largest, k as
    large as possible. The median lies outside if fewer than k of n values fall on one
    side of it, each of which does so with probability 1/2 (Conover, Practical
    Nonparametric Statistics, 3.2).

    Raises:
        ValueError: fewer than `LEAST_PAIRS` values.
    """
    n, ordered = len(values), sorted(values)
    if n < LEAST_PAIRS:
        raise ValueError(f"{n} values say nothing of a median: {LEAST_PAIRS} or more")
    below, outside = 0, 1  # values left out on each side; 2**n * P(at most so many)
    while 2 * (outside + math.comb(n, below + 1)) <= 0.05 * 2**n:
        below += 1
        outside += math.comb(n, below)
    return Interval(
        ordered[below], statistics.median(values), ordered[n - 1 - below], n
    )


def paired_ratios(
    base: Measure, other: Measure, *, least: int, most: int, narrow: float
) -> dict[str, Interval]:
    """What `other` costs in units of what `base` costs, one ratio a pair.

    Pairs are added until each interval is narrower than `narrow`; to stop so costs a
    little of the confidence (94 instead of 95 % on simulated normal noise). The two
    take turns in going first, and the first pair is not counted.

    Args:
        base: what is compared with.
        other: what is compared.
        least: pairs at least.
        most: pairs at most, whatever the intervals are by then.
        narrow: wanted width of the intervals.
    """
    ratios: dict[str, list[float]] = {}
    intervals: dict[str, Interval] = {}
    for pair in range(most + 1):
        if pair % 2:
            theirs, ours = base(pair), other(pair)
        else:
            ours, theirs = other(pair), base(pair)
        if pair:
            for name in ours:
                ratios.setdefault(name, []).append(ours[name] / theirs[name])
        if pair >= max(least, LEAST_PAIRS):
            intervals = {name: median_interval(r) for name, r in ratios.items()}
            if all(interval.width < narrow for interval in intervals.values()):
                break
    return intervals


def verdict(name: str, ratio: Interval, bar: float, narrow: float = math.inf) -> str:
    """A line that says whether the upper end of the interval is within the bar."""
    met = "met" if ratio.high <= bar else "missed"
    line = (
        f"{name}: {ratio.median:.3f} (95 %: {ratio.low:.3f} to {ratio.high:.3f}, "
        f"{ratio.pairs} pairs), bar {bar:.2f} {met}"
    )
    if ratio.width >= narrow:
        line += f"; no more pairs allowed, the interval is {ratio.width:.3f} wide"
    return line
