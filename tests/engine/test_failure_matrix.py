"""Every row of the matrix that the installed vLLM has (`docs/failed-loads.md`)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvplugin.integration.vllm.failures import MATRIX, Channel, FailedLoads
from kvplugin.integration.vllm.policy_config import SCHEDULER_CLASS
from kvplugin.integration.vllm.versions import vllm_version
from tests.engine import asking, load_faults
from tests.engine.asking import BLOCK, assert_same
from tests.engine.host import EngineHost, EngineStartError, offload
from tests.engine.prompts import tokens

HERE = [row for row in MATRIX if (vllm_version() or "").startswith(row.vllm)]
CASES = [
    (row, model)
    for row in HERE
    for model in (("llama",) if row.groups.startswith("one") else ("gemma", "mistral"))
]
"""A model with several groups, and one whose only group has a window."""
TOLD = [case for case in CASES if case[0].channel is not Channel.NONE]
UNTOLD = [case for case in CASES if case[0].channel is Channel.NONE]


def name_of(case: tuple[FailedLoads, str]) -> str:
    row, model = case
    return f"{model}-{'ours' if 'Plugin' in row.scheduler else 'any'}"


def start(
    case: tuple[FailedLoads, str], start_engine: Any, models: dict[str, Path]
) -> EngineHost:
    row, model = case
    arguments: dict[str, Any] = {
        "model": str(models[model]),
        "skip_tokenizer_init": True,
        "kv_cache_memory_bytes": 64 << 20,
        "prepare": load_faults.loads_can_fail,
        "kv_transfer_config": offload(64 << 20, "fail"),
    }
    if "Plugin" in row.scheduler:
        arguments["scheduler_cls"] = SCHEDULER_CLASS
    return start_engine(**arguments)


@pytest.fixture(scope="module")
def models(llama: Path, gemma: Path, mistral: Path) -> dict[str, Path]:
    return {"llama": llama, "gemma": gemma, "mistral": mistral}


@pytest.fixture(scope="module", params=TOLD, ids=name_of)
def engine(request: Any, start_engine: Any, models: Any) -> Iterator[EngineHost]:
    """Of one row; it ends before the next one starts."""
    host = start(request.param, start_engine, models)
    yield host
    host.close()


def stored_prompt(engine: EngineHost, seed: str) -> tuple[list[int], Any]:
    """A prompt that is in host memory only, and its answer when it was computed."""
    prompt = tokens(seed, 4 * BLOCK + 9)
    cold = engine.run(asking.ask_one, prompt)
    local = engine.run(asking.ask_one, prompt)
    assert engine.run(asking.reset)
    loaded = engine.run(asking.ask_one, prompt)
    assert (cold.cached_tokens, loaded.cached_tokens) == (0, 4 * BLOCK)
    assert_same(local, loaded)
    assert engine.run(asking.reset)
    return prompt, cold


def assert_nothing_is_held(engine: EngineHost) -> None:
    assert not any(engine.run(asking.balance).values())
    assert engine.run(asking.reset, True)


def test_recompute_gives_the_right_text(engine):
    engine.run(asking.set_failure_policy, "recompute")
    prompt, cold = stored_prompt(engine, "recompute")
    engine.run(load_faults.fail_loads)
    answer = engine.run(asking.ask_one, prompt)
    engine.run(load_faults.fail_loads, 0)
    assert engine.run(asking.reset)
    again = engine.run(asking.ask_one, prompt)

    assert answer.cached_tokens == 0
    assert_same(cold, answer)
    assert again.cached_tokens == 4 * BLOCK, "what was computed instead is stored"
    assert_nothing_is_held(engine)


def test_fail_ends_the_request_with_an_error_and_no_other(engine):
    engine.run(asking.set_failure_policy, "fail")
    prompt, cold = stored_prompt(engine, "fail")
    engine.run(load_faults.fail_loads)
    failed, other = engine.run(asking.ask, [prompt, tokens("other", BLOCK)])
    engine.run(load_faults.fail_loads, 0)
    again = engine.run(asking.ask_one, prompt)

    assert (failed.finish_reason, failed.tokens) == ("error", ())
    assert (other.finish_reason, len(other.tokens)) == ("length", 4)
    assert again.cached_tokens < 4 * BLOCK, "what failed has left host memory"
    assert_same(cold, again)
    log = engine.log.read_text()
    assert "a load failed for request" in log
    assert "made to fail by the test" in log
    assert_nothing_is_held(engine)


def test_a_load_past_its_deadline_is_given_up_and_its_blocks_are_kept(engine):
    engine.run(asking.set_failure_policy, "recompute")
    prompt, cold = stored_prompt(engine, "late")
    engine.run(load_faults.hold_loads)
    answer = engine.run(load_faults.answer_past_the_deadline, prompt, 31.0)
    held = engine.run(asking.balance)
    assert not engine.run(asking.reset)
    engine.run(load_faults.release_loads)
    engine.run(asking.ask_one, tokens("goes on", 3))

    assert answer.cached_tokens == 0
    assert_same(cold, answer)
    assert held["engine blocks"] > 0, "a copy may still write into them"
    assert_nothing_is_held(engine)


@pytest.mark.parametrize("case", UNTOLD, ids=name_of)
def test_where_nobody_can_be_told_it_is_tried_again_and_then_the_engine_ends(
    case, start_engine, models
):
    engine = start(case, start_engine, models)
    prompt, _ = stored_prompt(engine, "untold")
    engine.run(load_faults.fail_loads, 3)
    at_last = engine.run(asking.ask_one, prompt)
    assert at_last.cached_tokens == 4 * BLOCK
    assert engine.run(asking.reset)
    assert_same(at_last, engine.run(asking.ask_one, prompt))

    assert engine.run(asking.reset)
    engine.run(load_faults.fail_loads)
    with pytest.raises(EngineStartError, match="made to fail by the test"):
        engine.run(asking.ask_one, prompt)
