"""Copies that fail: the right text or a clear error, and nothing lost."""

from typing import Any

import pytest

from tests.engine import asking, faults
from tests.engine.asking import BLOCK, assert_close, assert_same
from tests.engine.host import EngineHost, offload
from tests.engine.prompts import tokens

PROMPT = tokens("failures", 4 * BLOCK + 9)


@pytest.fixture(scope="module")
def recompute(start_tiny: Any) -> EngineHost:
    return start_tiny(
        prepare=faults.copies_can_fail,
        kv_transfer_config=offload(cpu_bytes=64 << 20),
    )


def assert_nothing_is_held(engine: EngineHost) -> None:
    assert not any(engine.run(asking.balance).values())
    assert engine.run(asking.reset, True)


def test_a_failed_load_is_recomputed_and_not_tried_again(recompute):
    cold = recompute.run(asking.ask_one, PROMPT)
    assert recompute.run(asking.reset)
    recompute.run(faults.fail_copies, "load")
    answer = recompute.run(asking.ask_one, PROMPT)
    recompute.run(faults.fail_copies, "")
    seen = recompute.run(asking.metrics)

    assert_same(cold, answer)
    assert seen["vllm:kvplugin_offload_failed_loads"] == 1
    assert seen["vllm:kvplugin_offload_loaded_tokens"] == 0
    assert_nothing_is_held(recompute)


def test_what_failed_to_load_is_stored_afresh_and_hits_again(recompute):
    recompute.run(asking.ask_one, PROMPT)
    assert recompute.run(asking.reset)
    recompute.run(faults.fail_copies, "load")
    recompute.run(asking.ask_one, PROMPT)
    recompute.run(faults.fail_copies, "")
    local = recompute.run(asking.ask_one, PROMPT)
    assert recompute.run(asking.reset)
    loaded = recompute.run(asking.ask_one, PROMPT)

    assert loaded.cached_tokens == 4 * BLOCK
    assert_same(local, loaded)
    assert_nothing_is_held(recompute)


def test_a_failed_store_is_never_served(recompute):
    recompute.run(faults.fail_copies, "store")
    cold = recompute.run(asking.ask_one, PROMPT)
    recompute.run(faults.fail_copies, "")
    assert recompute.run(asking.reset)
    again = recompute.run(asking.ask_one, PROMPT)

    assert again.cached_tokens == 0
    assert_same(cold, again)
    assert recompute.run(asking.metrics)["vllm:kvplugin_offload_failed_stores"] >= 1
    assert_nothing_is_held(recompute)


def test_a_failed_load_fails_only_requests_that_needed_it(recompute):
    other = tokens("another", 3 * BLOCK + 5)
    alone = recompute.run(asking.ask_one, other)
    recompute.run(asking.ask_one, PROMPT)
    assert recompute.run(asking.reset)
    recompute.run(faults.fail_copies, "load")
    together = recompute.run(asking.ask, [PROMPT, other, PROMPT[: 2 * BLOCK + 3]])
    recompute.run(faults.fail_copies, "")

    assert_close(alone, together[1])
    assert {answer.finish_reason for answer in together} == {"length"}
    assert_nothing_is_held(recompute)


def test_under_vllms_default_policy_the_request_ends_with_an_error(start_tiny):
    engine = start_tiny(
        prepare=faults.copies_can_fail,
        kv_transfer_config=offload(64 << 20, "fail"),
    )
    cold = engine.run(asking.ask_one, PROMPT)
    assert engine.run(asking.reset)
    engine.run(faults.fail_copies, "load")
    failed = engine.run(asking.ask_one, PROMPT)
    engine.run(faults.fail_copies, "")
    again = engine.run(asking.ask_one, PROMPT)

    assert failed.finish_reason == "error"
    assert "a load failed for request" in engine.log.read_text()
    assert "made to fail by the test" in engine.log.read_text()
    assert_same(cold, again)
    assert_nothing_is_held(engine)
