"""Zeroing destroys nobody's bytes, and what destroys none raises no alarm."""

from random import Random

import pytest

from kvplugin.block_pool import BlockPool
from kvplugin.hashing import make_key
from kvplugin.hooks import Hooks, VictimContext, hookimpl
from kvplugin.scheduler.output import SchedulerOutput
from kvplugin.testing import (
    ContentError,
    ContentModel,
    Row,
    ToyModel,
    Void,
    assert_poisoned,
    watched_content,
)
from kvplugin.testing.rules import PLAIN
from tests.core.manager_setups import full, mamba
from tests.testing.driver import config_of
from tests.testing.lab import Lab


def zero_in_flight(memory: ContentModel, model: ToyModel, blocks: list[int]) -> None:
    model.submit(SchedulerOutput(1, new_block_ids_to_zero=blocks))
    assert not any(memory.is_void(block, Void.ZEROED) for block in blocks)


def test_blocks_that_were_withdrawn_may_be_zeroed() -> None:
    """Their request lost them in the step that gave them to it: nobody's bytes."""
    pool = BlockPool(9)
    memory = watched_content(config_of((full(),), 9), pool)
    model = ToyModel(memory, depth=2)
    mine, lost = pool.get_new_blocks(1), pool.get_new_blocks(2)
    zero_in_flight(memory, model, [*mine, *lost])
    pool.free_blocks(lost)
    model.execute()
    assert memory.is_void(mine[0], Void.ZEROED)
    assert_poisoned(memory, pool)


def test_blocks_of_somebody_else_may_not_be_zeroed() -> None:
    pool = BlockPool(9)
    memory = watched_content(config_of((full(),), 9), pool)
    model = ToyModel(memory, depth=2)
    lost = pool.get_new_blocks(1)
    zero_in_flight(memory, model, lost)
    pool.free_blocks(lost)
    assert pool.get_new_blocks(1) == lost
    with pytest.raises(ContentError, match="zeroed, and was handed to somebody else"):
        model.execute()


def test_blocks_that_can_be_hit_are_zeroed_if_asked() -> None:
    """And who hits them is told."""
    pool = BlockPool(9)
    memory = watched_content(config_of((full(),), 9), pool)
    (block,) = pool.get_new_blocks(1)
    histories = PLAIN.histories(range(4))
    memory.write(0, Row("a", [block]), 0, histories)
    pool.insert([block], [make_key(bytes(32), 0)])
    pool.free_blocks([block])
    model = ToyModel(memory)
    model.submit(SchedulerOutput(1, new_block_ids_to_zero=[block]))
    model.execute()
    with pytest.raises(ContentError, match="holds zeros"):
        memory.read(0, Row("b", [block]), range(4), histories)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("depth", [1, 2])
def test_random_runs_raise_no_false_alarm(depth: int, drafts: int, policy: str) -> None:
    """Victims chosen at random lose blocks that the same step gave them: they are
    free then, and no oracle minds what the workers do with them."""
    preemptions = 0
    for seed in range(4):
        random = Random(seed)
        lab = Lab(
            (full(), mamba("align", drafts=drafts)),
            24 + 2 * drafts,
            depth=depth,
            drafts=drafts,
            lookahead=drafts,
            held=False,
            hooks=Hooks.of(AnyVictim(random)),
            policy=policy,
            max_num_seqs=random.choice([2, 256]),
        )
        for _ in range(80):
            if random.random() < 0.4 and len(lab.scheduler.requests) < 5:
                first = 100 * random.randrange(2)
                prompt = range(first, first + random.randrange(1, 33))
                lab.add(prompt, random.randrange(1, 12), priority=random.randrange(3))
            lab.step()
        lab.drain()
        preemptions += sum(r.num_preemptions for r in lab.requests.values())
    assert preemptions


class AnyVictim:
    def __init__(self, random: Random) -> None:
        self.random = random

    @hookimpl
    def kvp_choose_victim(self, ctx: VictimContext) -> str:
        return str(self.random.choice(ctx.candidates).request_id)
