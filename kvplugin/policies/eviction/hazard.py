"""What `Reuse` learns: how soon runs of blocks are hit, by their traits and their age.

A *run* is what one release leaves: blocks with a common fate. Time is counted in
releases, an *epoch* being `EPOCH` of them, and the ages of runs are told apart in
*slots*: single epochs at first, then three slots each time the age doubles.

Two things are counted, both in runs, and old counts fade:

- hits and releases by *traits* (turn, growth and length of the request). The share of
  hits, against the average one, puts a run in a *class*;
- a life table of each class (Kaplan and Meier, 1958): how many runs came through a
  slot of age, and how many were hit in it. Evicted runs count as well, as long as
  their keys are remembered, so ages that the pool is too small for are known too.

Out of the life table comes the worth of a block at each age: the most hits a block and
release that keeping it can bring, over all times to stop waiting at. That is the index
of Gittins (Bandit processes and dynamic allocation indices, 1979). Hit density by class
and age as the measure for eviction is LHD's (Beckmann, Chen and Cidon, NSDI 2018).
"""

from collections.abc import Sequence
from math import exp, log
from typing import Final

# Tuned on the first halves of Mooncake's request traces (Qin et al., FAST 2025), whole
# and with requests left out, and on generated ones: loops, scans, agents, shared
# prefixes, conversations. Most lie on plateaus; learning more rarely costs hits where
# few requests were seen, less weight on the common shape some in long conversations.
EPOCH: Final = 8
"""Releases, the finest age that is told apart."""
LEVELS: Final = 11
"""Doublings of the epoch that are told apart: ages up to 49,000 releases."""
_HALF_LIFE: Final = 4096
"""Releases after which a count is worth half."""
LEARN_EVERY: Final = 16
"""Epochs; sooner in a young pool."""
_BASE_WEIGHT: Final = 4.0
"""Runs that the assumption "worth falls with age" weighs as much as, in each slot."""
_BASE_RATE: Final = 0.05
"""Hits a run expected while its age doubles, before anything is known."""
_SHAPE_WEIGHT: Final = 1000.0
"""Runs of a class that weigh as much as the shape of the curve of all classes."""
_RATIO_WEIGHT: Final = 3.0
"""Expected hits that weigh as much as the assumption that a class is average."""
_TRAIT_WEIGHT: Final = 40.0
"""Runs with the same traits that weigh as much as what is known of each trait."""
_TRAIT_POWER: Final = 0.8
"""Traits are not independent: their effects are multiplied to this power."""
_KERNEL: Final = (1, 2, 3, 2, 1)
"""Weights of neighbouring slots in the curve of all classes."""
_STEP: Final = 1.25
"""Ratio of hits between one class and the next."""
_LAST_DIFFERS: Final = 0.5
"""Hits of last blocks against the average, up to which they go apart."""
_RENEWAL: Final = 1.3
"""What is hit more often is also hit again more often: power on that ratio."""
_MIDDLE: Final = 5
"""Class of runs that are hit as often as the average."""

NUM_SLOTS: Final = 3 * LEVELS + 4
"""The last one is for all ages beyond."""
SHARED: Final = 2 * _MIDDLE + 1
"""Class of prefixes that several requests begin with; below it, classes by traits."""
LAST: Final = SHARED + 1
"""Class of the last block of a request, which often is not full or soon replaced."""
NUM_CLASSES: Final = LAST + 1

_GROWTHS: Final = 4
_LENGTHS: Final = 16
_NUM_TRAITS: Final = 3 * _GROWTHS * _LENGTHS

Rank = tuple[float, int, int]
"""Worth, slot (negative: of the same worth, the older goes first), class."""


def first_slot(level: int) -> int:
    """First slot whose width is `2**level` epochs; the last one is `3 * level + 5`."""
    return 3 * level + 3 if level else 0


def slot_of(birth: int, epoch: int) -> int:
    """Slot at `epoch` of what was released at the epoch `birth`."""
    for level in range(LEVELS):
        if (epoch >> (level + 1)) - (birth >> (level + 1)) < 3:
            return 3 * level + (epoch >> level) - (birth >> level)
    return NUM_SLOTS - 1


def _widths() -> list[float]:
    """Releases that a run spends in each slot."""
    widths = [float(EPOCH)] * 3
    for level in range(LEVELS):
        # Every second run skips the last slot of a level: cohorts leave in pairs.
        widths += [EPOCH * w * 2.0**level for w in (1.0, 1.0, 0.5)]
    return [*widths, EPOCH * 2.0**LEVELS]


_LOG_STEP: Final = log(_STEP)
_WIDTHS: Final = _widths()
_MIDDLES: Final = [sum(_WIDTHS[:i]) + w / 2 for i, w in enumerate(_WIDTHS)]


def traits_of(turn: int, growth: int, length: int) -> int:
    """Traits of a request as one number.

    Args:
        turn: requests before it that it continues.
        growth: blocks it has beyond the one it continues.
        length: all its blocks.
    """
    growing = 0 if not turn else 1 + (8 * growth >= length) + (4 * growth >= length)
    size = min(length.bit_length(), _LENGTHS - 1)
    return (min(turn, 2) * _GROWTHS + growing) * _LENGTHS + size


class Learner:
    """What is known of the runs of one group.

    Args:
        offset: added to the classes, to tell groups apart.
    """

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.class_of = [offset + _MIDDLE] * _NUM_TRAITS
        """Class by traits."""
        self.ranks: list[list[Rank]] = []
        """Of each class its slots, those of least worth first."""
        self.last_differs = True
        """Whether last blocks are hit so rarely that they are worth a run."""
        self._released = [0.0] * _NUM_TRAITS
        self._hit = [0.0] * _NUM_TRAITS
        self._hits = [[0.0] * NUM_SLOTS for _ in range(NUM_CLASSES)]
        self._survivals = [[0.0] * NUM_SLOTS for _ in range(NUM_CLASSES)]
        self.learn()

    def released(self, traits: int) -> None:
        """A run with these traits was released."""
        self._released[traits] += 1.0

    def hit(self, cls: int, slot: int, share: float, traits: int | None) -> None:
        """A share of a run was hit; traits are None where classes are not by traits."""
        self._hits[cls - self.offset][slot] += share
        if traits is not None:
            self._hit[traits] += share

    def survived(self, cls: int, slot: int, runs: float) -> None:
        """So many runs left a slot without a hit."""
        self._survivals[cls - self.offset][slot] += runs

    def learn(self) -> None:
        """Classes and ranks out of the counts."""
        self._classify()
        base = self._base_curve()
        self.ranks = []
        for cls in range(NUM_CLASSES):
            worth = _gittins(self._curve(cls, base))
            self.ranks.append(
                sorted((w, -slot, self.offset + cls) for slot, w in enumerate(worth))
            )

    def fade(self) -> None:
        """Old counts lose weight; once for each `learn` of a pool that is not young."""
        keep = 0.5 ** (EPOCH * LEARN_EVERY / _HALF_LIFE)
        for counts in (self._released, self._hit, *self._hits, *self._survivals):
            counts[:] = [keep * count for count in counts]

    def _base_curve(self) -> list[float]:
        """Hits a release and run at each slot, of all classes by traits together."""
        hits = [sum(column) for column in zip(*self._hits[:SHARED], strict=True)]
        left = [sum(column) for column in zip(*self._survivals[:SHARED], strict=True)]
        time = [(h + s) * w for h, s, w in zip(hits, left, _WIDTHS, strict=True)]
        reach = len(_KERNEL) // 2
        curve = []
        for slot, (width, age) in enumerate(zip(_WIDTHS, _MIDDLES, strict=True)):
            weight = _BASE_WEIGHT * _KERNEL[reach] * width
            hit, spent = weight * _BASE_RATE / age, weight
            for i, k in enumerate(_KERNEL, slot - reach):
                if 0 <= i < NUM_SLOTS:
                    hit += k * hits[i]
                    spent += k * time[i]
            curve.append(min(hit / spent * width, 0.9))
        return curve

    def _curve(self, cls: int, base: Sequence[float]) -> list[float]:
        """Probability of a hit in each slot of a class, for what comes so far."""
        hits, left = self._hits[cls], self._survivals[cls]
        ratio = _STEP ** (_RENEWAL * (cls - _MIDDLE))
        if cls >= SHARED:
            seen = zip(hits, left, base, strict=True)
            expected = sum((h + s) * b for h, s, b in seen)
            ratio = (sum(hits) + _RATIO_WEIGHT) / (expected + _RATIO_WEIGHT)
            if cls == LAST:
                self.last_differs = ratio <= _LAST_DIFFERS
        k = _SHAPE_WEIGHT
        return [
            min((h + k * min(1.0, ratio * b)) / (h + s + k), 0.999)
            for h, s, b in zip(hits, left, base, strict=True)
        ]

    def _classify(self) -> None:
        """The class of each combination of traits, from its share of hits."""
        released, hit = sum(self._released), sum(self._hit)
        if not hit:
            return
        average = hit / released
        effects = [self._effect(kind, average) for kind in range(3)]
        k, most = _TRAIT_WEIGHT, -log(average)
        for traits, n in enumerate(self._released):
            turn, growing, size = _values(traits)
            effect = effects[0].get(turn, 0.0) + effects[1].get(growing, 0.0)
            effect = min(effect + effects[2].get(size, 0.0), most)
            if n:
                hits = self._hit[traits] / average + k * exp(effect)
                effect = log(hits / (n + k))
            step = max(-_MIDDLE, min(_MIDDLE, round(effect / _LOG_STEP)))
            self.class_of[traits] = self.offset + _MIDDLE + step

    def _effect(self, kind: int, average: float) -> dict[int, float]:
        """By value of one trait, the logarithm of its effect on the share of hits."""
        sums: dict[int, tuple[float, float]] = {}
        for traits, n in enumerate(self._released):
            if n:
                value = _values(traits)[kind]
                hits, runs = sums.get(value, (_TRAIT_WEIGHT * average, _TRAIT_WEIGHT))
                sums[value] = hits + self._hit[traits], runs + n
        return {
            value: _TRAIT_POWER * log(hits / runs / average)
            for value, (hits, runs) in sums.items()
        }


def due(epoch: int) -> bool:
    """Whether to learn at this epoch; often in a young pool."""
    return not epoch % LEARN_EVERY or (epoch < LEARN_EVERY and not epoch & (epoch - 1))


def _values(traits: int) -> tuple[int, int, int]:
    rest, size = divmod(traits, _LENGTHS)
    turn, growing = divmod(rest, _GROWTHS)
    return turn, growing, size


def _gittins(curve: Sequence[float]) -> list[float]:
    """Worth at each slot: hits a release, for the best time to stop waiting.

    From the oldest slot on: a slot takes the stretch after it along while that is worth
    more than itself, in linear time.
    """
    worth = [0.0] * len(curve)
    stretches: list[tuple[float, float, float]] = []  # hits, releases, share not hit
    for slot in range(len(curve) - 1, -1, -1):
        hits, left = curve[slot], 1.0 - curve[slot]
        time = _WIDTHS[slot] * (1.0 - hits / 2)
        while stretches and stretches[-1][0] * time > hits * stretches[-1][1]:
            later_hits, later_time, later_left = stretches.pop()
            hits += left * later_hits
            time += left * later_time
            left *= later_left
        stretches.append((hits, time, left))
        worth[slot] = hits / time
    return worth
