"""What `benchmarks/offload.py` makes of its measurements."""

import random
from collections.abc import Callable, Iterator, Mapping

import pytest
from click.testing import CliRunner

from benchmarks import offload
from benchmarks._ratios import (
    Interval,
    Measure,
    median_interval,
    paired_ratios,
    verdict,
)

LEFT_OUT = {6: 0, 8: 0, 9: 1, 10: 1, 20: 5, 25: 7, 50: 17, 100: 39}
"""Values to leave out on each side, by their number: quantiles of the binomial
distribution with p = 1/2, as tables of the sign test have them."""


@pytest.mark.parametrize("count", LEFT_OUT)
def test_the_interval_is_that_of_the_sign_test(count: int) -> None:
    values = [float(i) for i in range(count)]
    random.Random(count).shuffle(values)
    low, median, high, pairs = median_interval(values)
    assert (low, high) == (LEFT_OUT[count], count - 1 - LEFT_OUT[count])
    assert median == (count - 1) / 2
    assert pairs == count


def test_few_values_are_refused() -> None:
    with pytest.raises(ValueError, match="6 or more"):
        median_interval([1.0] * 5)


def noises(rng: random.Random) -> Mapping[str, Callable[[], float]]:
    """Distributions with median 1."""
    return {
        "even": lambda: rng.uniform(0.9, 1.1),
        "skewed": lambda: rng.lognormvariate(0.0, 0.5),
        "spikes": lambda: 1 + rng.uniform(-0.01, 0.01) * rng.choice([1, 1, 1, 30]),
    }


@pytest.mark.parametrize("noise", ["even", "skewed", "spikes"])
@pytest.mark.parametrize("count", [10, 15, 40])
def test_the_median_is_inside_in_95_of_100_runs(noise: str, count: int) -> None:
    draw = noises(random.Random(count))[noise]
    runs = 1000
    inside = 0
    for _ in range(runs):
        low, _, high, _ = median_interval([draw() for _ in range(count)])
        inside += low <= 1 <= high
    assert inside / runs > 0.94


def costs(values: Iterator[float], order: list[str], name: str) -> Measure:
    def measure(pair: int) -> Mapping[str, float]:
        order.append(f"{name}{pair}")
        return {"seconds": next(values), "CPU": 2.0}

    return measure


def constant(value: float) -> Iterator[float]:
    while True:
        yield value


def test_pairs_take_turns_and_the_first_is_not_counted() -> None:
    order: list[str] = []
    base = costs(iter([1.0] + [2.0] * 6), order, "a")
    other = costs(iter([100.0] + [3.0] * 6), order, "b")
    found = paired_ratios(base, other, least=6, most=6, narrow=0.04)
    assert " ".join(order) == "b0 a0 a1 b1 b2 a2 a3 b3 b4 a4 a5 b5 b6 a6"
    assert found == {
        "seconds": Interval(1.5, 1.5, 1.5, 6),
        "CPU": Interval(1.0, 1.0, 1.0, 6),
    }


def settled(value: float, turns: int) -> Iterator[float]:
    """Ratios around 1 that are `value` off for some pairs, then no longer."""
    yield 1.0  # of the pair that is not counted
    for turn in range(turns):
        yield 1 + value if turn % 2 else 1 - value
    yield from constant(1.0)


@pytest.mark.parametrize(
    ("value", "turns", "pairs"),
    [
        (0.0, 6, 10),
        (0.019, 1000, 10),  # an interval of 0.038
        (0.1, 6, 15),  # the first number of pairs to leave out 3 on each side
        (0.1, 1000, 40),
    ],
)
def test_pairs_are_added_until_the_interval_is_narrow(
    value: float, turns: int, pairs: int
) -> None:
    found = paired_ratios(
        costs(constant(1.0), [], ""),
        costs(settled(value, turns), [], ""),
        least=10,
        most=40,
        narrow=0.04,
    )
    interval = found["seconds"]
    assert interval.pairs == found["CPU"].pairs == pairs
    assert (interval.width < 0.04) == (pairs < 40)


def test_the_verdict_is_about_the_upper_end() -> None:
    met, missed = Interval(0.98, 1.0, 1.05, 12), Interval(0.98, 1.0, 1.051, 12)
    assert verdict("a step", met, 1.05) == (
        "a step: 1.000 (95 %: 0.980 to 1.050, 12 pairs), bar 1.05 met"
    )
    assert verdict("a step", missed, 1.05).endswith("bar 1.05 missed")


def test_an_interval_that_stayed_wide_is_said_to_be() -> None:
    wide = Interval(0.98, 1.0, 1.04, 60)
    assert verdict("a step", wide, 1.05, narrow=0.04).endswith(
        "no more pairs allowed, the interval is 0.060 wide"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--sections", "idle,stroes"], "stroes: there are first-tokens, idle"),
        (["--pairs", "5"], "5 is not in the range x>=6"),
    ],
)
def test_a_wrong_option_is_refused_before_an_engine_starts(
    arguments: list[str], said: str
) -> None:
    done = CliRunner().invoke(offload.main, arguments)
    assert done.exit_code == 2
    assert said in done.output
