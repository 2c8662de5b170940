"""What the eviction policy of host memory hears, and that the core's work there."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvplugin import hookimpl
from kvplugin.connectors.offload import config as offload_config
from kvplugin.connectors.offload.config import OffloadConfig
from kvplugin.contract import MISS, Lookup
from kvplugin.errors import ConfigError
from kvplugin.hooks import EvictionPolicyContext, Hooks
from kvplugin.policies.eviction import LRU, BlockContext
from tests.offload.engine_model import Engine
from tests.offload.setup_model import View, prompt

HINT = BlockContext(priority=3)


class Heard(LRU):
    """LRU that notes what it hears."""

    needs_hits = needs_steps = True

    def __init__(self) -> None:
        super().__init__()
        self.inserts: list[BlockContext] = []
        self.hits: list[BlockContext] = []
        self.times: list[float] = []

    def insert(self, ids: Sequence[int], ctx: BlockContext) -> None:
        self.inserts += [ctx] * len(ids)
        super().insert(ids, ctx)

    def hit(self, ids: Sequence[int], ctx: BlockContext) -> None:
        self.hits.append(ctx)
        super().hit(ids, ctx)

    def step(self, now: float, soon: Any, dropped: Any) -> None:
        assert not list(soon)
        assert not dropped
        self.times.append(now)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Heard]:
    """All policies of the name `heard`, in the order in which they are made."""
    policies: list[Heard] = []

    def make(ctx: EvictionPolicyContext) -> Heard | None:
        if ctx.name != "heard":
            return None
        policies.append(Heard())
        return policies[-1]

    plugin: Any = SimpleNamespace(
        __name__="mine",
        kvp_register_eviction_policies=hookimpl(lambda: {"heard": "notes"}),
        kvp_make_eviction_policy=hookimpl(make),
    )
    hooks = Hooks.of(plugin)
    monkeypatch.setattr(offload_config, "get_hooks", lambda: hooks)
    return policies


def test_it_hears_whose_blocks_are_stored_and_loaded(
    made: list[Heard], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(View, "block_context", HINT, raising=False)
    engine = Engine(eviction_policy="heard")
    engine.serve(prompt(16))
    assert made[-1].inserts == [HINT] * 4
    engine.forget_local()
    engine.serve(prompt(16))
    assert made[-1].hits == [HINT]


def test_it_hears_the_time_once_a_step(made: list[Heard]) -> None:
    engine = Engine(eviction_policy="heard")
    engine.serve(prompt(16), prompt(8, seed=1))
    times = made[-1].times
    assert len(times) > 1
    assert times == sorted(times)


@pytest.mark.parametrize("policy", ["lru", "retention", "retention+arc"])
def test_retention_keeps_what_a_request_asked_to_keep(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(host_blocks=8, eviction_policy=policy)
    monkeypatch.setattr(View, "block_context", HINT, raising=False)
    engine.serve(prompt(16, seed=1))
    monkeypatch.setattr(View, "block_context", None)
    engine.serve(*(prompt(16, seed=seed) for seed in range(2, 6)))
    kept = Lookup(16) if policy != "lru" else MISS
    assert engine.offered(prompt(16, seed=1)) == kept


@pytest.mark.parametrize("policy", ["queue", "queue+reuse", "retention+queue+lru"])
def test_a_policy_that_needs_demand_is_refused(policy: str) -> None:
    with pytest.raises(ConfigError, match=r"'queue'.* not for .* eviction_policy"):
        OffloadConfig(cpu_bytes_to_use=1 << 20, eviction_policy=policy)
