"""What `benchmarks/pd.py` makes of its measurements."""

import random
import signal
import sys

import psutil
import pytest
from click.testing import CliRunner

from benchmarks import _pd_worker, pd
from benchmarks._pd_engines import Pair
from benchmarks._pd_work import Received
from benchmarks._ratios import Interval
from tests.nixl.reading import wait_until


@pytest.mark.parametrize(
    ("percent", "expected"), [(50, 50), (99, 99), (100, 100), (0.5, 1), (99.5, 100)]
)
def test_a_percentile_is_one_of_the_values(percent: float, expected: int) -> None:
    values = [float(i) for i in range(1, 101)]
    random.Random(0).shuffle(values)
    assert pd.percentile(values, percent) == expected


def test_a_percentile_of_one_value_is_that_value() -> None:
    assert pd.percentile([7.0], 99) == 7.0


def test_the_ratio_of_percentiles_has_an_interval_around_it() -> None:
    rng = random.Random(1)

    def side(scale: float) -> list[list[float]]:
        return [[scale * rng.uniform(1, 2) for _ in range(20)] for _ in range(30)]

    ratio = pd.percentile_ratio(side(2.0), side(1.0), 99)
    assert ratio.low <= ratio.median <= ratio.high
    assert ratio.low == pytest.approx(2.0, rel=0.1)
    assert ratio.high == pytest.approx(2.0, rel=0.1)
    assert ratio.pairs == 30


def test_one_slow_transfer_widens_the_interval() -> None:
    even = [[1.0] * 20 for _ in range(30)]
    one_slow = [*even[:-1], [5.0] * 20]
    ratio = pd.percentile_ratio(one_slow, even, 99)
    assert ratio == Interval(1.0, 5.0, 5.0, 30)


@pytest.mark.parametrize(
    ("bar", "ratio", "met"),
    [
        (pd.Bar(1.05, 1.15), Interval(0.9, 1.05, 1.15, 30), True),
        (pd.Bar(1.05, 1.15), Interval(0.9, 1.06, 1.15, 30), False),
        (pd.Bar(1.05, 1.15), Interval(0.9, 1.0, 1.16, 30), False),
        (pd.Bar(0.95, 0.85, True), Interval(0.85, 0.95, 1.0, 30), True),
        (pd.Bar(0.95, 0.85, True), Interval(0.84, 0.95, 1.0, 30), False),
        (pd.Bar(0.95, 0.85, True), Interval(0.9, 0.94, 1.0, 30), False),
    ],
)
def test_a_bar_is_for_the_median_and_an_end(
    bar: pd.Bar, ratio: Interval, met: bool
) -> None:
    assert bar.met_by(ratio) is met
    assert pd.sentence("first token", ratio, bar).endswith("met" if met else "missed")


def transfer(posting: float, gaps: list[float]) -> pd.Turn:
    longest = {"posting": posting, "polling": 0.002}
    return pd.Turn(0.07, Received(0.0, 64_000_000, 0.02, longest, gaps, 1))


def test_figures_of_transfers() -> None:
    turns = [transfer(0.001, [0.01, 0.02]) for _ in range(99)]
    found = pd.figures([*turns, transfer(0.5, [0.3])])
    assert found["GB/s"] == pytest.approx(3.2)
    assert found["posting p99 ms"] == pytest.approx(1.0)
    assert found["gap p99 ms"] == pytest.approx(20.0)
    assert "gap ms" not in pd.figures([transfer(0.001, [])])


def test_calls_are_timed_even_when_they_raise() -> None:
    taken: list[float] = []

    def fails() -> None:
        raise ValueError

    with pytest.raises(ValueError, match=r"^$"):
        _pd_worker._timed(fails, taken)()
    assert len(taken) == 1


WITH_A_CHILD = "import subprocess; subprocess.run(['sleep', '600'])"


def test_a_pair_runs_while_it_is_awake() -> None:
    """With the processes that its engines have started."""
    engines = [psutil.Popen([sys.executable, "-c", WITH_A_CHILD]) for _ in "pd"]
    pair = Pair(*engines)
    everybody = list(engines)
    try:
        for engine in engines:
            wait_until(engine.children, "its child")
            everybody += engine.children()

        def stopped() -> list[bool]:
            return [one.status() == psutil.STATUS_STOPPED for one in everybody]

        pair.send(signal.SIGSTOP)
        wait_until(lambda: all(stopped()), "the stop")
        with pair.awake():
            wait_until(lambda: not any(stopped()), "going on")
        wait_until(lambda: all(stopped()), "the stop")
    finally:
        for process in everybody:
            process.kill()
        for engine in engines:
            engine.wait(60)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--sections", "contiguous,decodign"], "decodign: there are contiguous"),
        (["--models", "llama3"], "llama3: there are llama, smollm2"),
        (["--pairs", "5"], "5 is not in the range x>=6"),
    ],
)
def test_a_wrong_option_is_refused_before_an_engine_starts(
    arguments: list[str], said: str
) -> None:
    done = CliRunner().invoke(pd.main, arguments)
    assert done.exit_code == 2
    assert said in done.output


def test_what_wants_blocks_in_order_comes_before_fragmentation() -> None:
    assert pd._parse("--sections", "fragmented,contiguous", pd.SECTIONS) == [
        "contiguous",
        "fragmented",
    ]
