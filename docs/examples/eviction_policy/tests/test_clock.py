"""CLOCK in a real block pool, and as the hooks make it."""

from collections.abc import Iterable
from hashlib import sha256

import kvplugin_clock
import pytest
from kvplugin_clock.policy import Clock

from kvplugin import BlockPool, ConfigError
from kvplugin.hashing import make_key
from kvplugin.hooks import EvictionPolicyContext, Hooks
from kvplugin.policies.eviction import NO_CONTEXT


def key(name: str) -> bytes:
    return make_key(sha256(name.encode()).digest(), 0)


class Cache:
    """A pool of nine usable blocks in which prompts have one block a letter."""

    def __init__(self, policy: Clock) -> None:
        self.pool = BlockPool(10, policy=policy)

    def serve(self, prompt: str) -> None:
        """Adopt the blocks that are there, compute the rest, free all."""
        row = [block for name in prompt if (block := self.pool.get(key(name)))]
        self.pool.adopt(row)
        missing = [name for name in prompt if self.pool.get(key(name)) is None]
        new = self.pool.get_new_blocks(len(missing))
        self.pool.insert(new, [key(name) for name in missing])
        self.pool.free_blocks(reversed(row + new))
        self.pool.check()

    def held(self, names: Iterable[str]) -> str:
        return "".join(name for name in names if self.pool.get(key(name)))


def test_without_hits_it_is_first_in_first_out_with_tails_before_heads() -> None:
    cache = Cache(Clock())
    cache.serve("abc")
    cache.serve("defghi")
    cache.serve("xy")
    assert cache.held("abcdefghi") == "adefghi"


def test_what_was_hit_outlives_a_stream_of_prompts_that_nobody_repeats() -> None:
    cache = Cache(Clock())
    cache.serve("abc")
    cache.serve("abc")
    for prompt in ("123456", "7", "8", "9"):
        cache.serve(prompt)
    assert cache.held("abc") == "abc"


def test_each_round_costs_a_chance() -> None:
    for chances, rounds in ((1, 1), (2, 2), (3, 2)):
        cache = Cache(Clock(chances))
        for _ in range(3):
            cache.serve("a")
        stream = (chr(1000 + i) for i in range(100))
        served = 0
        while cache.held("a"):
            cache.serve(next(stream))
            served += 1
        assert served == 8 * (rounds + 1) + 1


def test_order_is_what_victims_do() -> None:
    clock = Clock(2)
    clock.release([1, 2, 3, 4, 5])
    for hits in ([1, 2, 4], [2], [4]):
        clock.hit(hits, NO_CONTEXT)
    for n in (1, 2, 2):
        expected = list(clock.order())[:n]
        assert clock.victims(n) == expected
        clock.check()


def test_a_block_keeps_its_place_while_it_is_in_use() -> None:
    clock = Clock()
    clock.release([1, 2, 3])
    for _ in range(1000):
        clock.pin([1])
        clock.release([1])
    assert list(clock.order()) == [1, 2, 3]
    clock.check()
    assert len(clock._heap) < 100


def test_more_victims_than_there_are_change_nothing() -> None:
    clock = Clock()
    clock.release([1, 2])
    with pytest.raises(ValueError, match="3 victims wanted, 2 evictable"):
        clock.victims(3)
    assert list(clock.order()) == [1, 2]


def context(**options: object) -> EvictionPolicyContext:
    return EvictionPolicyContext(name="clock", options=options, num_blocks=10)


def test_the_hooks_make_it_with_its_options() -> None:
    hooks = Hooks.of(kvplugin_clock)
    policy = hooks.make_eviction_policy(context(chances=3))
    assert isinstance(policy, Clock)
    assert policy._most == 3
    assert "clock" in hooks.register_eviction_policies()


@pytest.mark.parametrize("options", [{"chance": 1}, {"chances": 0}, {"chances": True}])
def test_wrong_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="eviction_policy_options"):
        Hooks.of(kvplugin_clock).make_eviction_policy(context(**options))
