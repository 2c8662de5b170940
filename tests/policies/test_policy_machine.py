"""Whatever is done to a pool, no policy hands out a used block or loses one."""

from collections import Counter
from functools import partial
from itertools import islice
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule, run_state_machine_as_test

from kvplugin.policies.eviction import NO_CONTEXT, BlockContext
from tests.core.naive_pool import Entry
from tests.core.test_block_pool_machine import CHAINS, KEYS, NUM_BLOCKS, PoolMachine
from tests.policies.policy_helpers import NAMES, make

CONTEXTS = st.builds(
    BlockContext,
    priority=st.integers(-1, 2),
    expires_at=st.none() | st.floats(0, 300),
    session=st.sampled_from([None, "a", "b"]),
    turn=st.integers(0, 3),
    cost_per_block=st.floats(0, 4),
    ends_session=st.booleans(),
)


class PolicyMachine(PoolMachine):
    """The pool's machine, with all that a policy may want to know: who asks, the time,
    and the keys that waiting requests want. Each chain of keys is of a group of its
    own."""

    def __init__(self, name: str) -> None:
        super().__init__(make(name), is_lru=name == "lru")
        self.context = NO_CONTEXT
        self.now = 0.0
        self.wanted: Counter[bytes] = Counter()

    @rule(context=CONTEXTS)
    def somebody_else_asks(self, context: BlockContext) -> None:
        self.context = context

    @rule(seconds=st.floats(0, 100), data=st.data())
    def step(self, seconds: float, data: Any) -> None:
        self.now += seconds
        waiting = sorted(self.wanted.elements())
        dropped: Counter[bytes] = Counter()
        if waiting:
            dropped.update(data.draw(st.permutations(waiting))[: len(waiting) // 2])
        soon = data.draw(st.lists(st.sampled_from(sorted(KEYS.values())), max_size=4))
        self.wanted = self.wanted - dropped + Counter(soon)
        self.pool.step(self.now, iter(soon), dropped)

    def _take(self, n: int) -> list[int]:
        without_key = min(n, len(self.model.stack))
        expected = list(islice(self.policy.order(), n - without_key))
        taken = super()._take(n)
        assert taken[without_key:] == expected
        return taken

    def _insert(self, blocks: list[int], data: Any) -> None:
        chain = data.draw(st.integers(0, CHAINS - 1))
        depth = data.draw(st.integers(0, NUM_BLOCKS - 1 - len(blocks)))
        parent = KEYS.get((chain, depth - 1))
        keys = [KEYS[chain, depth + at] for at in range(len(blocks))]
        self.pool.insert(blocks, keys, parent=parent, depth=depth, ctx=self.context)
        parents = [parent, *keys]
        self.model.insert(
            Entry(block, keys[at], parents[at], depth + at)
            for at, block in enumerate(blocks)
        )

    @invariant()
    def order_is_the_free_keyed_blocks(self) -> None:
        order = list(self.policy.order())
        assert order == list(self.policy.order())
        assert sorted(order) == sorted(self.model.recency)


def run(name: str, examples: int, steps: int) -> None:
    run_state_machine_as_test(
        partial(PolicyMachine, name),
        settings=settings(
            max_examples=examples, stateful_step_count=steps, deadline=None
        ),
    )


@pytest.mark.parametrize("name", NAMES)
def test_pool_does_what_the_model_does(name: str) -> None:
    run(name, examples=15, steps=30)


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_pool_does_what_the_model_does_for_long(name: str) -> None:
    run(name, examples=300, steps=60)
