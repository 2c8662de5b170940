"""Steps in flight: a block that is handed out too early is seen when they execute."""

from collections.abc import Sequence

import pytest

from kvplugin.block_pool import BlockPool
from kvplugin.scheduler.output import (
    CachedRequestData,
    ModelOutput,
    NewRequestData,
    SchedulerOutput,
)
from kvplugin.testing import ContentError, Row, ToyModel, watched_content
from kvplugin.testing.rules import PLAIN, Identity
from kvplugin.testing.toy_reference import reference
from tests.core.manager_setups import full, mamba, window
from tests.testing.driver import config_of

PROMPT = list(range(8))


class Pipeline:
    """Two steps in flight of request ``a``, in two blocks of a pool of three."""

    def __init__(self) -> None:
        config = config_of((full(),), 4)
        self.pool = BlockPool(4)
        self.memory = watched_content(config, self.pool)
        self.model = ToyModel(self.memory, depth=2)
        self.rows = self.pool.get_new_blocks(2)
        self.model.submit(
            SchedulerOutput(
                1, [NewRequestData("a", PROMPT[:6], (self.rows,), 0)], (), {"a": 6}
            )
        )
        self.model.submit(
            SchedulerOutput(2, (), [CachedRequestData("a", None, 6)], {"a": 1})
        )
        assert self.model.is_full

    def admit(self, blocks: Sequence[int]) -> SchedulerOutput:
        data = NewRequestData("b", PROMPT[:4], (list(blocks),), 0)
        return SchedulerOutput(
            3, [data], (), {"b": 4}, finished_req_ids=frozenset({"a"})
        )


def test_steps_execute_in_order_and_late() -> None:
    line = Pipeline()
    first, second = line.model.execute(), line.model.execute()
    tokens = reference(line.memory.groups, PROMPT[:6], 2)
    assert [*first.sampled_token_ids["a"], *second.sampled_token_ids["a"]] == tokens
    assert (first.step, second.step, len(line.model)) == (1, 2, 0)


def test_blocks_that_wait_for_the_step_in_flight() -> None:
    line = Pipeline()
    line.model.execute()
    line.model.execute()
    line.pool.free_blocks(line.rows)
    line.model.submit(line.admit(line.pool.get_new_blocks(1)))
    output = line.model.execute()
    assert output.sampled_token_ids == {
        "b": reference(line.memory.groups, PROMPT[:4], 1)
    }
    assert line.model.tracked == ["b"]


def test_blocks_freed_under_a_step_in_flight() -> None:
    line = Pipeline()
    line.model.execute()
    line.pool.free_blocks(line.rows)
    with pytest.raises(ContentError, match="which is free"):
        line.model.execute()


def test_blocks_handed_out_under_a_step_in_flight() -> None:
    line = Pipeline()
    line.model.execute()
    line.pool.free_blocks(line.rows)
    line.model.submit(line.admit(line.pool.get_new_blocks(2)))
    with pytest.raises(ContentError, match=r"request 'a'.*handed to somebody else"):
        line.model.execute()


# -- identities ------------------------------------------------------------------------


@pytest.mark.parametrize("resumed", [False, True])
def test_an_identity_is_that_of_the_time_of_the_step(resumed: bool) -> None:
    """New weights while a step is in flight do not change what it computes."""
    old, new = Identity(("weights", 1)), Identity(("weights", 2))
    config = config_of((full(),), 9)
    memory = watched_content(config, BlockPool(9))
    memory.in_use = None
    now = [old]
    model = ToyModel(memory, depth=2, identity_of=lambda request_id: now[0])
    first = NewRequestData("a", PROMPT[:6], ([1, 2],), 0)
    steps = [SchedulerOutput(1, [first], (), {"a": 6})]
    if resumed:
        again = CachedRequestData("a", ([3, 4],), 0, True, PROMPT[:6])
        steps.append(SchedulerOutput(2, (), [again], {"a": 6}))
    for step in steps:
        model.submit(step)
    now[0] = new
    (expected,) = reference(memory.groups, PROMPT[:6], 1, old)
    for _ in steps:
        assert model.execute().sampled_token_ids["a"] == [expected]
    last = CachedRequestData("a", ([5, 6],), 0, True, PROMPT[:6])
    output = run(model, SchedulerOutput(3, (), [last], {"a": 6}))
    assert output.sampled_token_ids["a"] == reference(memory.groups, PROMPT[:6], 1, new)
    assert output.sampled_token_ids["a"] != [expected]


def test_tokens_of_a_resumed_request_are_those_of_its_step() -> None:
    """Not those that the scheduler knows when the step executes."""
    memory = watched_content(config_of((full(),), 9), BlockPool(9))
    memory.in_use = None
    tokens = PROMPT[:6]
    model = ToyModel(memory, depth=2, tokens_of=lambda request_id: PROMPT)
    run(
        model,
        SchedulerOutput(1, [NewRequestData("a", tokens, ([1, 2],), 0)], (), {"a": 6}),
    )
    known = list(tokens)
    resumed = CachedRequestData("a", ([3, 4],), 0, True, known)
    model.submit(SchedulerOutput(2, (), [resumed], {"a": 6}))
    known.append(9)
    sampled = model.execute().sampled_token_ids["a"]
    assert sampled == reference(memory.groups, PROMPT[:6], 1)


# -- what a worker is told -------------------------------------------------------------


def run(model: ToyModel, output: SchedulerOutput) -> ModelOutput:
    model.submit(output)
    return model.execute()


def test_a_preempted_request_does_not_go_on() -> None:
    line = Pipeline()
    line.model.execute()
    line.model.execute()
    data = CachedRequestData("a", None, 7)
    with pytest.raises(ContentError, match="preempted, not resumed"):
        run(
            line.model,
            SchedulerOutput(3, (), [data], {"a": 1}, preempted_req_ids=frozenset("a")),
        )


def test_unknown_requests_and_tokens() -> None:
    line = Pipeline()
    line.model.execute()
    line.model.execute()
    unknown = CachedRequestData("z", None, 7)
    with pytest.raises(ContentError, match="does not know request 'z'"):
        run(line.model, SchedulerOutput(3, (), [unknown], {"z": 1}))
    data = CachedRequestData("a", None, 7)
    with pytest.raises(ContentError, match=r"tokens 7 to 9 .* the worker knows 8"):
        run(line.model, SchedulerOutput(4, (), [data], {"a": 2}))


def test_tokens_of_a_resumed_request_are_the_schedulers() -> None:
    """It discarded the output of a step in flight when it took the blocks."""
    config = config_of((full(),), 9)
    memory = watched_content(config, BlockPool(9))
    known = {"a": PROMPT[:6]}
    model = ToyModel(memory, tokens_of=known.__getitem__)
    memory.in_use = None
    run(
        model,
        SchedulerOutput(
            1, [NewRequestData("a", PROMPT[:6], ([1, 2],), 0)], (), {"a": 6}
        ),
    )
    resumed = CachedRequestData("a", ([3, 4],), 0, resumed=True)
    output = run(model, SchedulerOutput(2, (), [resumed], {"a": 6}))
    assert output.sampled_token_ids["a"] == reference(memory.groups, PROMPT[:6], 1)


# -- failed loads ----------------------------------------------------------------------


def test_what_comes_of_a_failed_load_is_wrong_and_stays_wrong() -> None:
    config = config_of((full(), window(6), mamba("all")), 30)
    memory = watched_content(config, BlockPool(30))
    memory.in_use = None
    model = ToyModel(memory)
    right = reference(memory.groups, PROMPT, 2)
    rows = ([1, 2, 3], [4, 5, 6], [7, 8, 9])
    new = NewRequestData("a", PROMPT, rows, 4)
    memory.invalidate([1, 4, 7])
    model.invalid_block_ids = {1}
    output = run(model, SchedulerOutput(1, [new], (), {"a": 4}))
    assert output.invalid_block_ids == {1}
    (token,) = output.sampled_token_ids["a"]
    assert token != right[0]
    # Who shares what was computed on top of it is wrong too, however right its tokens.
    shares = NewRequestData("b", [*PROMPT, right[0]], ([10, 2, 3], *rows[1:]), 8)
    for group, block in enumerate((10, 4)):
        memory.write(group, Row("c", [block]), 0, PLAIN.histories(PROMPT[:4]))
    output = run(model, SchedulerOutput(2, [shares], (), {"b": 1}))
    assert not output.invalid_block_ids
    assert output.sampled_token_ids["b"] != [right[1]]
