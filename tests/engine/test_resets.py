"""What empties host memory: a reset that names connectors, sleep, a clearing pause."""

from typing import Any

import pytest

from tests.engine import asking
from tests.engine.asking import BLOCK, assert_same
from tests.engine.host import EngineHost, offload
from tests.engine.policy_asking import uncached
from tests.engine.prompts import tokens
from tests.engine.version import is_019

PROMPT = tokens("resets", 3 * BLOCK + 9)


@pytest.fixture(scope="module")
def engine(start_tiny: Any) -> EngineHost:
    return start_tiny(kv_transfer_config=offload(64 << 20))


@pytest.fixture(autouse=True)
def nothing_leaks(engine: EngineHost) -> Any:
    yield
    assert not any(engine.run(asking.balance).values())
    assert engine.run(asking.reset, True)


def sleep(llm: Any, level: int) -> None:
    llm.sleep(level)
    llm.wake_up()


def pause(llm: Any, clears: bool) -> None:
    core = llm.llm_engine.engine_core.engine_core
    core.pause_scheduler(clear_cache=clears)
    core.resume_scheduler()


def roll_weights(llm: Any, rows: int) -> None:
    """New weights, by a worker RPC: each token gets the embedding of another."""
    llm.collective_rpc(_roll_embeddings, args=(rows,))


def _roll_embeddings(worker: Any, rows: int) -> None:
    import torch

    with torch.inference_mode():
        for name, weights in worker.get_model().named_parameters():
            if "embed_tokens" in name:
                weights.copy_(weights.roll(rows, 0))


def reset_with_a_running_request(llm: Any, prompt: list[int]) -> asking.Answer:
    """Reset everything in the middle of an answer of four tokens."""
    engine = llm.llm_engine
    engine.add_request("runs", {"prompt_token_ids": prompt}, asking.greedy(4))
    engine.step()
    engine.step()
    connector = asking.scheduler(llm).connector
    while connector.has_pending_push_work():  # vLLM raises while stores hold blocks
        engine.step()
    assert llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert connector._scheduler._tier.num_stored_blocks == 0
    while True:
        for output in engine.step():
            if output.finished:
                return asking.answer_of(output)


@pytest.mark.parametrize(
    ("what", "argument", "empties"),
    [
        (asking.reset, False, False),
        (asking.reset, True, True),
        (sleep, 0, False),
        # 0.19 does not ask the connector.
        (sleep, 1, not is_019()),
        (sleep, 2, not is_019()),
        (pause, False, False),
        (pause, True, not is_019()),
    ],
)
def test_what_empties_host_memory(engine, what, argument, empties):
    cold = engine.run(asking.ask_one, PROMPT)
    engine.run(what, argument)
    assert engine.run(asking.reset)
    answer = engine.run(asking.ask_one, PROMPT)

    assert answer.cached_tokens == (0 if empties else 3 * BLOCK)
    assert answer.tokens == cold.tokens


def test_a_request_that_runs_through_a_reset_is_answered_and_stored_afresh(engine):
    cold = engine.run(asking.ask_one, PROMPT)
    assert engine.run(asking.reset, True)
    answer = engine.run(reset_with_a_running_request, PROMPT)
    assert answer.tokens == cold.tokens

    local = engine.run(asking.ask_one, PROMPT)
    assert engine.run(asking.reset)
    loaded = engine.run(asking.ask_one, PROMPT)
    assert loaded.cached_tokens == 3 * BLOCK
    assert_same(local, loaded)


def test_after_new_weights_and_a_reset_nothing_of_the_old_is_found(engine):
    old = engine.run(asking.ask_one, PROMPT)
    engine.run(roll_weights, 1)
    (new,) = engine.run(uncached, [PROMPT], 4)
    assert new.candidates != old.candidates
    assert engine.run(asking.reset)
    assert engine.run(asking.ask_one, PROMPT).cached_tokens == 3 * BLOCK, "kept"

    assert engine.run(asking.reset, True)
    answer = engine.run(asking.ask_one, PROMPT)
    assert answer.cached_tokens == 0
    assert_same(new, answer)
    engine.run(roll_weights, -1)
