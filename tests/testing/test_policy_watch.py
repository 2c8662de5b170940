"""Where tests run, a pool does not cover up for a broken policy."""

from collections.abc import Callable, Sequence
from itertools import islice

import pytest

from kvplugin.block_pool import BlockPool
from kvplugin.errors import IntegrityError
from kvplugin.hooks import Hooks
from kvplugin.policies.eviction import LRU, EvictionPolicy
from kvplugin.testing import Lab, PolicyError, strict_policies, watch_policy
from tests.core.eviction_faults import (
    FAULTY_POLICIES,
    NUM_BLOCKS,
    Faulty,
    RandomPolicy,
    Recorder,
)
from tests.core.manager_setups import FORMAT, PolicyPlugin, full
from tests.core.manager_setups import Setup as ManagerSetup

pytest_plugins = ["pytester"]

SOUND: dict[str, Callable[[], EvictionPolicy]] = {
    "LRU": LRU,
    "random": RandomPolicy,
    "recorder": Recorder,
}


def press(policy: EvictionPolicy) -> Lab:
    """Requests that hit, evict and lose each other's blocks, in a pool of this
    policy."""
    plugin = Hooks.of(PolicyPlugin(policy))
    lab = Lab([full()], NUM_BLOCKS - 1, hooks=plugin, hash_format=FORMAT)
    for i in range(12):
        first = 100 * (i % 3)
        lab.add(range(first, first + 9 + i), 4)
        lab.run()
    lab.kv.evict_blocks(range(NUM_BLOCKS))
    lab.drain()
    return lab


@pytest.mark.parametrize("name", FAULTY_POLICIES)
def test_a_lab_names_the_fault(name: str) -> None:
    policy = FAULTY_POLICIES[name]()
    with pytest.raises(PolicyError, match=rf"{type(policy).__name__} failed: \w+: .+"):
        press(policy)
    assert policy.faults == 1


@pytest.mark.parametrize("policy", SOUND.values(), ids=SOUND)
def test_a_sound_policy_passes(policy: Callable[[], EvictionPolicy]) -> None:
    assert not press(policy()).kv.block_pool.policy_failures


class KeepsPinned(LRU):
    def pin(self, ids: Sequence[int]) -> None: ...


class LosesSome(LRU):
    def release(self, ids: Sequence[int]) -> None:
        super().release([block for block in ids if block % 3])


class ForgetsNothing(LRU):
    def forget(self, ids: Sequence[int]) -> None: ...


class KeepsVictims(LRU):
    def victims(self, n: int) -> list[int]:
        return list(islice(self.order(), n))


WRONG_ORDERS = [KeepsPinned, LosesSome, ForgetsNothing, KeepsVictims]


@pytest.mark.parametrize("policy", WRONG_ORDERS)
def test_a_lab_finds_a_policy_that_ranks_the_wrong_blocks(policy: type[LRU]) -> None:
    """By the pool's check after a step, or by a choice within the step."""
    with pytest.raises((PolicyError, IntegrityError), match=r"evictable|free keyed"):
        press(policy())


def manager_pool(policy: Faulty) -> BlockPool:
    return ManagerSetup((full(),), NUM_BLOCKS).manager(policy).block_pool


def bare_pool(policy: Faulty) -> BlockPool:
    return BlockPool(NUM_BLOCKS, policy=policy)


def use(pool: BlockPool) -> None:
    """Everything that a policy hears of."""
    in_use: list[int] = []
    for i in range(3 * NUM_BLOCKS):
        first, second = pool.get_new_blocks(2)
        for block, name in ((first, b"a"), (second, b"b")):
            pool.insert([block], [name + bytes([i]) * 31 + bytes(4)])
        pool.free_blocks([first])
        pool.adopt([first])
        pool.free_blocks([second, *in_use])
        in_use = [first]
        if i % NUM_BLOCKS == NUM_BLOCKS - 1:
            pool.evict_blocks([first])


@pytest.mark.parametrize("make", [manager_pool, bare_pool])
@pytest.mark.parametrize("name", FAULTY_POLICIES)
def test_strict_wherever_a_pool_comes_from(
    name: str, make: Callable[[Faulty], BlockPool]
) -> None:
    policy = FAULTY_POLICIES[name]()
    with strict_policies(), pytest.raises(PolicyError, match="failed: ") as caught:
        use(make(policy))
    assert caught.value.__cause__ is not None
    forgiving = make(FAULTY_POLICIES[name]())
    use(forgiving)
    assert forgiving.policy_failures == 1, "as in production, once it is over"


def test_one_pool_alone_can_be_watched() -> None:
    watched, other = (bare_pool(FAULTY_POLICIES["chooses too few"]()) for _ in range(2))
    watch_policy(watched)
    use(other)
    with pytest.raises(PolicyError, match="distinct victims wanted"):
        use(watched)


def test_the_fixture(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        from tests.testing.test_policy_watch import FAULTY_POLICIES, bare_pool, use

        def broken():
            use(bare_pool(FAULTY_POLICIES["chooses a used block"]()))

        def test_strict(kv_strict_policies):
            broken()

        def test_forgiving():
            broken()
        """
    )
    result = pytester.runpytest()
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*PolicyError: eviction policy ChoosesUsedBlock*"])
