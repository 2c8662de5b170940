"""Sampled blocks are followed from allocation to eviction."""

import pytest

from kvplugin.errors import ConfigError
from kvplugin.residency import Residency, ResidencySampler
from tests.core.manager_setups import Setup, full
from tests.core.manager_steps import cache, compute


class Clock:
    """Time that stands still until it is set."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("rate", [0, -0.1, 1.1])
def test_rate_is_a_share(rate: float) -> None:
    with pytest.raises(ConfigError, match="sample_rate"):
        ResidencySampler(rate)


def test_life_of_a_block() -> None:
    clock = Clock()
    sampler = ResidencySampler(1, clock=clock)
    setup = Setup((full(),), 3)
    kv = setup.manager(metrics_collector=sampler)
    cache(kv, setup.request("a", range(5)))
    for clock.now in (1, 3, 6, 10, 15):
        cache(kv, setup.request("b", range(5)))
    sampler.take()
    clock.now = 20
    assert compute(kv, setup.request("c", range(50, 58)))
    assert Residency(20, 5, (3, 4, 5)) in sampler.take()
    assert sampler.take() == []


def test_only_the_sample_is_followed() -> None:
    chances = iter([0.5, 0.05])
    sampler = ResidencySampler(0.1, chance=lambda: next(chances), clock=Clock())
    sampler.allocated([1, 2])
    sampler.used([1, 2])
    sampler.evicted([1])
    assert sampler.take() == []
    sampler.evicted([2])
    assert sampler.take() == [Residency(0, 0, ())]
    sampler.evicted([2])
    assert sampler.take() == []


def test_reset_forgets() -> None:
    sampler = ResidencySampler(1)
    sampler.allocated([1, 2])
    sampler.evicted([1])
    sampler.reset()
    sampler.evicted([2])
    assert sampler.take() == []
