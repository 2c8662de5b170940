"""Policies in a running vLLM: more hits, the same answers, and no harm done."""

import json
import re
from functools import partial
from typing import Any

import pytest

from kvplugin.hints import RequestHints, hints_of
from kvplugin.policies.eviction.registry import POLICIES
from kvplugin.replay.formats import read_trace
from tests.engine import asking
from tests.engine.asking import BLOCK, assert_close
from tests.engine.host import EngineStartError, offload
from tests.engine.policy_asking import (
    Served,
    ask_with,
    hot_and_scans,
    install_plugin,
    policies,
    pool_state,
    server_arguments,
    trace_lines,
    uncached,
)
from tests.engine.prompts import tokens

POLICY = "reuse"
"""The policy that is compared with LRU."""
BLOCKS = 13
"""Of the real model's cache: too few for the workload."""
ROUNDS = 6
ANSWER = 24
"""Tokens of an answer where requests are preempted."""


@pytest.fixture(scope="module")
def start_small(start_engine, smollm2):
    """The real model with a KV cache that is too small."""
    return partial(
        start_engine,
        model=str(smollm2),
        dtype="float32",  # of processors without AMX bf16 takes several times as long
        max_model_len=8 * BLOCK,
        kv_cache_memory_bytes=128 << 20,
        num_gpu_blocks_override=BLOCKS,
    )


@pytest.fixture(scope="module")
def lru(start_small) -> Served:
    """vLLM without kvplugin."""
    engine = start_small()
    served = engine.run(hot_and_scans, ROUNDS)
    engine.close()
    return served


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return tmp_path_factory.mktemp("trace") / "smollm2.jsonl"


@pytest.fixture(scope="module")
def steered(start_small, trace) -> tuple[Any, Served]:
    """vLLM with a policy, and what it served."""
    engine = start_small(**policies(eviction_policy=POLICY, record_trace=str(trace)))
    return engine, engine.run(hot_and_scans, ROUNDS)


def test_more_tokens_hit_and_the_texts_are_the_same(lru, steered):
    engine, served = steered
    assert served.texts == lru.texts
    assert served.cached_tokens >= lru.cached_tokens + 6 * BLOCK
    state = engine.run(pool_state)
    assert state == {
        "class": "KVPluginScheduler",
        "policy": type_of(POLICY),
        "failures": 0,
        "in use": 0,
    }
    assert f"eviction {POLICY}" in engine.log.read_text()


def type_of(policy: str) -> str:
    """Name of the policy's class."""
    return POLICIES[policy].place.rpartition(".")[2]


def test_the_record_is_a_trace(steered, trace):
    _, served = steered
    read = read_trace(trace)
    assert read.block_size == BLOCK
    requests = read.entries[: len(served.texts)]
    assert sum(line.cached_tokens for line in requests) == served.cached_tokens
    assert {line.output_length for line in requests} <= {*range(1, 7)}
    assert all(
        len(line.ids) == (line.input_length + line.output_length) // BLOCK
        for line in requests
    )


def test_a_reset_empties_the_cache(steered):
    engine, _ = steered
    assert engine.run(asking.reset)
    prompt = tokens("reset", 2 * BLOCK + 1)
    assert engine.run(asking.ask_one, prompt).cached_tokens == 0
    assert engine.run(asking.ask_one, prompt).cached_tokens == 2 * BLOCK
    engine.run(pool_state)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Pairs that share two blocks; answers begin just before the end of a third."""
    return [
        tokens(f"policies {i // 2}", 2 * BLOCK) + tokens(f"own {i}", BLOCK - 8 - i)
        for i in range(6)
    ]


def same_answers(engine: Any, prompts: list[list[int]], rounds: int = 2) -> int:
    """Ask for all at once, which preempts; tokens that hit."""
    expected = engine.run(uncached, prompts, ANSWER)
    hit = 0
    for _ in range(rounds):
        answers = engine.run(asking.ask, prompts, ANSWER)
        for one, other in zip(expected, answers, strict=True):
            assert_close(one, other)
        hit += sum(answer.cached_tokens for answer in answers)
    assert engine.run(pool_state)["in use"] == 0
    return hit


def start_tight(start: Any, **arguments: Any) -> Any:
    """An engine whose cache is too small for `prompts` with their answers."""
    return start(num_gpu_blocks_override=13, max_model_len=8 * BLOCK, **arguments)


@pytest.fixture(scope="module")
def everything(start_tiny, tmp_path_factory) -> Any:
    """Every decision is a policy's, and the least sensible one evicts."""
    record = tmp_path_factory.mktemp("trace") / "llama.jsonl"
    engine = start_tight(
        start_tiny,
        **policies(
            eviction_policy="retention+queue+random",
            waiting_order="shortest_first",
            admission="free_share",
            victim="most_blocks",
            record_trace=str(record),
        ),
    )
    engine.record = record
    return engine


def test_whatever_policies_decide_the_answers_are_the_same(everything, prompts):
    same_answers(everything, prompts)
    assert everything.run(asking.preemptions) > 0
    assert everything.run(pool_state)["failures"] == 0


def test_hints_arrive_and_mistakes_harm_nobody(everything, prompts):
    before = len(trace_lines(everything.record))
    hint = {"priority": 7, "session": "mine", "turn": 2}
    answers = everything.run(
        ask_with,
        [prompts[0]] * 5,
        [
            None,
            {"kvplugin": hint},
            {"kvplugin": '{"priority": 8}'},
            {"kv_transfer_params": {"kvplugin": {"priority": 9}}},
            {"kvplugin": {"priorty": 7}},
        ],
    )
    assert len(set(answers)) == 1
    lines = trace_lines(everything.record)[before:]
    hints = [(line.get("priority", 0), line.get("turn", 0)) for line in lines]
    assert sorted(hints) == [(0, 0), (0, 0), (7, 2), (8, 0), (9, 0)]
    assert all(line.get("session") is not hint["session"] for line in lines)
    log = everything.log.read_text()
    assert log.count("are ignored") == 1
    assert "Did you mean 'priority'?" in log


@pytest.mark.parametrize(
    "body",
    [
        {"vllm_xargs": {"kvplugin": json.dumps({"priority": 3})}},
        {"kv_transfer_params": {"kvplugin": {"priority": 3}}},
    ],
)
def test_hints_pass_through_the_server(everything, body):
    for arguments in everything.run(server_arguments, body):
        hints = hints_of(arguments, arguments.get("kv_transfer_params"))
        assert hints == RequestHints(priority=3)


def test_a_policy_that_goes_wrong_is_replaced_and_the_engine_lives(
    start_tiny, prompts, tmp_path
):
    engine = start_tight(
        start_tiny,
        prepare=partial(
            install_plugin, tmp_path, "mischief", "tests.engine.misbehaving"
        ),
        **policies_of_plugin("misbehaving"),
    )
    same_answers(engine, prompts)
    state = engine.run(pool_state)
    assert (state["policy"], state["failures"]) == ("LRU", 1)
    log = engine.log.read_text()
    assert log.count("eviction policy Misbehaving failed and is replaced by LRU") == 1
    engine.close()


def policies_of_plugin(name: str) -> dict[str, Any]:
    """As `policies`, of a plugin that only the engine's process has."""
    return policies() | {"additional_config": {"kvplugin": {"eviction_policy": name}}}


def test_beside_the_offload_connector(start_tiny, prompts):
    engine = start_tight(
        start_tiny,
        kv_transfer_config=offload(64 << 20),
        **policies(eviction_policy=POLICY, waiting_order="cached_first"),
    )
    same_answers(engine, prompts)
    assert not any(engine.run(asking.balance).values())
    loaded = engine.run(asking.metrics)["vllm:kvplugin_offload_loaded_tokens"]
    assert loaded > 0
    assert engine.run(asking.reset, True)
    engine.run(pool_state)
    engine.close()


def test_a_hybrid_model(start_engine, gemma, prompts):
    engine = start_engine(
        model=str(gemma),
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=64 << 20,
        num_gpu_blocks_override=61,
        max_model_len=8 * BLOCK,
        **policies(eviction_policy=f"queue+{POLICY}"),
    )
    assert engine.run(asking.number_of_groups) > 1
    assert same_answers(engine, prompts, rounds=3) > 0
    assert engine.run(pool_state)["failures"] == 0
    assert engine.run(asking.reset)
    engine.close()


def test_in_a_process_of_its_own(start_tiny, prompts, tmp_path):
    record = tmp_path / "trace.jsonl"
    engine = start_tiny(
        environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        **policies(eviction_policy=POLICY, record_trace=str(record)),
    )
    hints = {"kvplugin": {"priority": 7}}
    first, second = engine.run(ask_with, [prompts[0]] * 2, [hints, None])
    assert first == second
    lines = trace_lines(record)[1:]
    assert sorted(line.get("priority", 0) for line in lines) == [0, 7]
    log = engine.log.read_text()
    assert re.search(rf"\(EngineCore pid=\d+\).* eviction {POLICY}", log)


def test_a_wrong_setting_ends_the_start(start_tiny):
    with pytest.raises(EngineStartError, match="Did you mean 'lru'"):
        start_tiny(**policies_of_plugin("lruu"))
