"""A step's output is verified as a whole before anything of it is believed."""

from collections.abc import Callable
from typing import Any

import pytest

from kvplugin.contract import NOTHING_HAPPENED, WorkerOutcome
from kvplugin.errors import IntegrityError
from kvplugin.scheduler import ModelOutput
from tests.scheduler.harness import Harness, next_token


def engine_with_a_step() -> Harness:
    """In step 2, "a" verifies two drafts, "b" begins and is not done, "c" waits, and
    "d" has ended meanwhile."""
    engine = Harness(drafts=2, connects=True, ranks=2, max_num_batched_tokens=11)
    engine.add("a", range(6), 9)
    engine.add("d", range(70, 74), 9)
    engine.step()
    engine.add("b", range(30, 50), 9)
    engine.add("c", range(50, 70), 9)
    output = engine.schedule()
    assert output.num_scheduled_tokens == {"a": 3, "d": 3, "b": 5}
    engine.scheduler.abort_request("d")
    return engine


def answer(**change: Any) -> ModelOutput:
    right: dict[str, Any] = {
        "sampled_token_ids": {"a": [7]},
        "draft_token_ids": {"a": [1, 2]},
        "outcomes": [NOTHING_HAPPENED, NOTHING_HAPPENED],
    }
    return ModelOutput(2, **right | change)


NO_TOKENS: list[Any] = [[-1], [2**32], [None], [1.0], ["5"], [True], "5", 5, None, {3}]
WRONG: dict[str, dict[str, Any]] = {
    "stranger": {"sampled_token_ids": {"a": [7], "zz": [1]}},
    "waiting": {"sampled_token_ids": {"a": [7], "c": [1]}},
    "stranger drafts": {"draft_token_ids": {"zz": [1]}},
    "no token of 'a'": {"sampled_token_ids": {}},
    "empty tokens of 'a'": {"sampled_token_ids": {"a": []}},
    "4 tokens of 'a'": {"sampled_token_ids": {"a": [7, 7, 7, 7]}},
    "a token of 'b'": {"sampled_token_ids": {"a": [7], "b": [7]}},
    "no outcome": {"outcomes": []},
    "1 outcome": {"outcomes": [NOTHING_HAPPENED]},
    "3 outcomes": {"outcomes": [NOTHING_HAPPENED] * 3},
    "no such block": {"invalid_block_ids": frozenset([1, 99])},
    **{f"tokens {x!r}": {"sampled_token_ids": {"a": x}} for x in NO_TOKENS},
    **{f"drafts {x!r}": {"draft_token_ids": {"a": x}} for x in NO_TOKENS},
    **{f"ended {x!r}": {"sampled_token_ids": {"a": [7], "d": x}} for x in NO_TOKENS},
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_what_cannot_be_changes_nothing(change: dict[str, Any]) -> None:
    engine = engine_with_a_step()
    right = {"finished_loads": frozenset(["a"])}
    if "outcomes" not in change:
        change = {"outcomes": [WorkerOutcome(**right)] * 2} | change
    before = engine.scheduler.state()
    tokens = list(engine.scheduler.requests["a"].request.all_token_ids)
    with pytest.raises(IntegrityError, match="the output of step 2 has"):
        engine.scheduler.update_from_output(answer(**change))
    assert engine.scheduler.state() == before
    assert engine.scheduler.requests["a"].request.all_token_ids == tokens
    engine.scheduler.check()
    news = engine.scheduler.update_from_output(answer())
    assert {item.req_id: list(item.new_token_ids) for item in news} == {
        "a": [7],
        "d": [],
    }


def test_the_request_is_named() -> None:
    engine = engine_with_a_step()
    with pytest.raises(
        IntegrityError, match=r"0 tokens of request 'a', due are 1 to 3"
    ):
        engine.scheduler.update_from_output(answer(sampled_token_ids={}))


GOOD: dict[str, Callable[[], ModelOutput]] = {
    "all drafts": lambda: answer(sampled_token_ids={"a": [7, 8, 9]}),
    "of one that ended": lambda: answer(
        sampled_token_ids={"a": [7], "d": [5, 5]}, draft_token_ids={"d": [1]}
    ),
    "empty where none is due": lambda: answer(sampled_token_ids={"a": [7], "b": ()}),
    "no drafts": lambda: answer(draft_token_ids={}),
}


@pytest.mark.parametrize("output", GOOD.values(), ids=GOOD)
def test_what_can_be_is_taken(output: Callable[[], ModelOutput]) -> None:
    engine = engine_with_a_step()
    assert engine.scheduler.update_from_output(output())
    engine.scheduler.check()


def test_tokens_that_do_not_count_need_not_come() -> None:
    """The request did not survive the step: whatever came of it is ignored."""
    for tokens in ({}, {"a": []}, {"a": [5]}):
        engine = Harness()
        engine.add("a", range(8), 2)
        engine.schedule()
        engine.scheduler.reset_prefix_cache(reset_running=True)
        engine.scheduler.update_from_output(ModelOutput(1, tokens))
        engine.in_flight.clear()
        engine.run()
        assert engine.outputs["a"][0] == next_token(range(8))
