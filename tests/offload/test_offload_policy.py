"""What host memory keeps is the offload policy's choice; what is right stays right."""

import logging
from collections.abc import Iterator, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from kvplugin import hookimpl
from kvplugin.connectors.offload import config as offload_config
from kvplugin.connectors.offload.config import OffloadConfig
from kvplugin.contract import MISS, Lookup
from kvplugin.errors import ConfigError
from kvplugin.hooks import Hooks, OffloadPolicyContext
from kvplugin.policies.eviction import BlockContext
from kvplugin.policies.offload import OffloadContext
from kvplugin.settings import read_settings
from tests.offload.engine_model import Engine
from tests.offload.setup_model import Request, Setup, View, prompt

SECOND = {"offload_policy": "second_touch"}


class Scripted:
    """Answers what it is told to, and remembers what it was asked."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[list[bytes], OffloadContext]] = []

    def admit(self, keys: Sequence[bytes], ctx: OffloadContext) -> Any:
        self.asked.append((list(keys), ctx))
        answer = self.answers.pop(0) if self.answers else True
        if isinstance(answer, Exception):
            raise answer
        return [answer] * len(keys) if isinstance(answer, bool) else answer


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scripted]:
    """The policy of this name."""
    policy = Scripted()

    def make(ctx: OffloadPolicyContext) -> Scripted | None:
        return policy if ctx.name == "scripted" else None

    plugin: Any = SimpleNamespace(
        __name__="mine",
        kvp_register_offload_policies=hookimpl(lambda: {"scripted": "as told"}),
        kvp_make_offload_policy=hookimpl(make),
    )
    hooks = Hooks.of(plugin)
    monkeypatch.setattr(offload_config, "get_hooks", lambda: hooks)
    return policy


def engine_of(setup: Setup | None = None, **settings: Any) -> Engine:
    return Engine(setup, **{"offload_policy": "scripted", **settings})


# -- the configuration -------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"offload_policy": "al"}, "'al' in offload_policy.* mean 'all'"),
        ({"offload_policy": 3}, "offload_policy"),
        ({"offload_policy_options": {"n": 1}}, "'all' takes no options, got n"),
        (SECOND | {"offload_policy_options": {"memry": 1}}, "mean 'memory'"),
    ],
)
def test_wrong_settings_are_refused_by_name(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_settings(OffloadConfig, {"cpu_bytes_to_use": 1 << 20} | settings, "here")


# -- what it is asked --------------------------------------------------------------


def test_it_is_asked_once_a_store_about_what_is_missing(scripted: Scripted) -> None:
    engine = engine_of(Setup(token_budget=8))
    (request,) = engine.serve(prompt(23))
    asked = [(keys, ctx.depth) for keys, ctx in scripted.asked]
    assert asked == [
        ([request.key(0), request.key(1)], 0),
        ([request.key(2), request.key(3)], 2),
        ([request.key(4)], 4),
    ]
    (ctx,) = {ctx.request_id: ctx for _, ctx in scripted.asked}.values()
    assert (ctx.request_id, ctx.block_tokens, ctx.prefix_tokens) == ("r0", 4, 20)
    assert (ctx.group, ctx.medium, ctx.context) == (0, "CPU", BlockContext())
    engine.serve(prompt(23))
    assert len(scripted.asked) == 3


def test_chunks_are_asked_about_as_one(scripted: Scripted) -> None:
    engine = engine_of(blocks_per_chunk=2)
    (request,) = engine.serve(prompt(23))
    ((keys, ctx),) = scripted.asked
    assert keys == [request.key(1), request.key(3)]
    assert (ctx.block_tokens, ctx.prefix_tokens) == (8, 16)


def test_what_hints_say_is_told(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    hint = BlockContext(priority=3)
    monkeypatch.setattr(View, "block_context", hint, raising=False)
    engine_of().serve(prompt(8))
    assert [ctx.context for _, ctx in scripted.asked] == [hint]


def test_a_mask_of_others_bools_is_told_apart(
    scripted: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    other = type("bool", (), {"__module__": "numpy"})
    scripted.answers = [[other(), other()]]
    engine_of().serve(prompt(8))
    assert "a numpy.bool: convert it with bool()" in caplog.text


# -- what comes of it --------------------------------------------------------------


def stored(engine: Engine, tokens: Sequence[int]) -> int:
    """Tokens that host memory has of a prompt."""
    engine.forget_local()
    return engine.offered(tokens).tokens


def test_a_mask_counts_up_to_its_first_hole(scripted: Scripted) -> None:
    scripted.answers = [[True, True, False, True, True]]
    engine = engine_of()
    engine.serve(prompt(20))
    assert stored(engine, prompt(20)) == 8
    counters = engine.totals.counters
    assert (counters["stored_blocks"], counters["refused_blocks"]) == (2, 3)
    engine.check_idle()


def test_behind_a_hole_it_is_asked_and_nothing_is_stored(scripted: Scripted) -> None:
    scripted.answers = [[True, False], True, True]
    engine = engine_of(Setup(token_budget=8))
    engine.serve(prompt(23))
    assert [ctx.depth for _, ctx in scripted.asked] == [0, 2, 4]
    assert stored(engine, prompt(23)) == 4
    assert engine.totals.counters["refused_blocks"] == 4
    # Another request fills the hole.
    engine.serve(prompt(23))
    assert stored(engine, prompt(23)) == 20


def test_a_no_stores_nothing(scripted: Scripted) -> None:
    scripted.answers = [False]
    engine = engine_of()
    engine.serve(prompt(20))
    engine.forget_local()
    assert engine.offered(prompt(20)) == MISS
    assert engine.totals.counters["refused_blocks"] == 5
    assert "stored_blocks" not in engine.totals.counters
    engine.check_idle()


def test_a_new_admission_has_no_hole(scripted: Scripted) -> None:
    scripted.answers = [False]
    engine = engine_of(Setup(token_budget=8))
    request = engine.add(prompt(20))
    engine.step()
    engine.preempt(request)
    engine.run()
    assert stored(engine, prompt(20)) == 20


def test_second_touch_stores_what_a_second_request_brings() -> None:
    engine = Engine(Setup(token_budget=8), **SECOND)
    first, second = [*prompt(12), *prompt(8, 1)], [*prompt(12), *prompt(8, 2)]
    engine.serve(first)
    assert stored(engine, first) == 0
    engine.serve(second)
    assert stored(engine, second) == 12
    engine.serve(first)
    assert engine.totals.counters["loaded_tokens"] == 12
    assert stored(engine, first) == 20


def test_second_touch_is_no_second_admission() -> None:
    engine = Engine(Setup(token_budget=8), **SECOND)
    request = engine.add(prompt(16))
    engine.step()
    engine.preempt(request)
    engine.run()
    assert stored(engine, prompt(16)) == 0


def test_min_depth_stores_long_prefixes_from_their_head() -> None:
    settings = {"offload_policy": "min_depth"}
    engine = Engine(
        Setup(token_budget=4), **settings, offload_policy_options={"min_tokens": 12}
    )
    engine.serve(prompt(11), prompt(12, 1))
    assert stored(engine, prompt(11)) == 0
    assert stored(engine, prompt(12, 1)) == 12


# -- policies that fail ------------------------------------------------------------

WRONG: dict[str, Any] = {
    "an error": RuntimeError("no idea"),
    "nothing": None,
    "too few": [True],
    "too many": [True] * 6,
    "numbers": [1] * 5,
    "names": ["yes"] * 5,
}


@pytest.mark.parametrize("case", WRONG)
def test_a_policy_that_fails_is_replaced_and_named(
    case: str, scripted: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    scripted.answers = [WRONG[case]]
    engine = engine_of()
    engine.serve(prompt(20), prompt(20, 1))
    assert len(scripted.asked) == 1
    for seed in range(2):
        assert engine.offered(prompt(20, seed)) == Lookup(20)
    (record,) = (r for r in caplog.records if r.levelno == logging.ERROR)
    assert "offload policy Scripted failed" in record.getMessage()
    assert engine.totals.gauges["policy_failures"] == 1
    assert "refused_blocks" not in engine.totals.counters
    engine.check()
    assert not engine.has_work()


# -- whatever it says --------------------------------------------------------------


class AtRandom:
    """Any mask."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def admit(self, keys: Sequence[bytes], ctx: OffloadContext) -> list[bool]:
        assert len(keys) * ctx.block_tokens <= ctx.prefix_tokens
        return [self._random.random() < 0.7 for _ in keys]


@pytest.mark.parametrize("seed", range(6))
def test_any_mask_leaves_every_read_right(seed: int, scripted: Scripted) -> None:
    """The engine model verifies every slot that is read."""
    random = Random(seed)
    scripted.admit = AtRandom(seed).admit  # type: ignore[method-assign]
    setup = Setup(usable_blocks=24, token_budget=random.choice([6, 24]))
    engine = engine_of(
        setup,
        host_blocks=random.choice([6, 20]),
        offload_prompt_only=random.random() < 0.5,
        blocks_per_chunk=random.choice([1, 2]),
    )
    waiting: list[Request] = []
    for _ in range(25):
        shared, own = prompt(random.randrange(1, 33)), prompt(5, random.randrange(4))
        waiting.append(engine.add([*shared, *own], random.randrange(1, 6)))
        for _ in range(random.randrange(4)):
            engine.step()
        if random.random() < 0.3:
            engine.forget_local()
        if engine.running and random.random() < 0.2:
            engine.preempt(engine.running[-1])
    engine.run()
    engine.check_idle()
    assert all(request.output for request in waiting)
    assert engine.totals.counters["refused_blocks"]
    assert engine.totals.counters["loaded_blocks"]
