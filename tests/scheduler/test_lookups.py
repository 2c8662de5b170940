"""Whatever a connector answers, nobody waits for what cannot be."""

from collections.abc import Callable
from typing import Any

import pytest

from kvplugin.contract import Lookup, RequestView
from tests.scheduler.harness import Connector, Harness, loaded, next_token


class Strange(Connector):
    """Answers what a test says."""

    answer: Callable[[], Any]

    def lookup(self, request: RequestView, num_local_tokens: int) -> Lookup:
        return self.answer()


def fails() -> None:
    raise KeyError("no idea")


ANSWERS: dict[str, Callable[[], Any]] = {
    "too many": lambda: Lookup(19),
    "far too many": lambda: Lookup(10**6),
    "less than none": lambda: Lookup(-5),
    "a float": lambda: Lookup(3.5),
    "a whole float": lambda: Lookup(4.0),
    "a bool": lambda: Lookup(True),
    "text": lambda: Lookup("4"),
    "nothing in it": lambda: Lookup(None),
    "ready is no bool": lambda: Lookup(4, ready="yes"),
    "vLLM's tuple": lambda: (4, True),
    "nothing": lambda: None,
    "a number": lambda: 7,
    "an error": fails,
}


@pytest.mark.parametrize("synchronously", [False, True])
@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_an_impossible_answer_is_a_miss_and_told_once(
    answer: Callable[[], Any], synchronously: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Harness(connects=True, synchronously=synchronously)
    engine.connector.__class__ = Strange
    engine.connector.answer = answer
    for name, first in (("a", 0), ("b", 50), ("c", 100)):
        engine.add(name, range(first, first + 18), 2)
    assert engine.step().num_scheduled_tokens == {"a": 16}
    engine.run()
    assert engine.outputs["b"][0] == next_token(range(50, 68))
    assert engine.connector.rows == {}
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert "Strange.lookup" in record.getMessage()


@pytest.mark.parametrize("tokens", [0, 1, 17, 18])
def test_all_that_is_possible_is_believed(tokens: int) -> None:
    engine = Harness(connects=True)
    engine.connector.__class__ = Strange
    engine.connector.answer = lambda: Lookup(tokens)
    engine.add("a", range(18))
    engine.step()
    assert bool(engine.connector.rows) == (tokens > 0)
    engine.step(loaded("a"))
    engine.run()
    assert engine.outputs["a"] == [next_token(range(18))]


def test_kinds_are_told_apart(caplog: pytest.LogCaptureFixture) -> None:
    engine = Harness(connects=True)
    engine.connector.__class__ = Strange
    for i, answer in enumerate(2 * [*ANSWERS.values()]):
        engine.connector.answer = answer
        engine.add(f"r{i}", range(4))
        engine.run()
    messages = [record.getMessage() for record in caplog.records]
    assert 4 <= len(messages) == len(set(messages)) <= len(ANSWERS)
