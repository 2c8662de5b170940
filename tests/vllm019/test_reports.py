"""Reports that come twice or late, ends that nobody steps for, other ways to start."""

from typing import Any

from tests.engine import asking
from tests.engine.asking import BLOCK, assert_close, assert_same, scheduler
from tests.engine.host import EngineHost, offload
from tests.engine.prompts import tokens


def repeat_reports(llm: Any) -> None:
    """From now on each report comes twice, and again with every later one."""
    half = scheduler(llm).connector._scheduler
    apply, earlier = half.apply, []

    def again(reports: Any) -> None:
        new = list(reports)
        apply([*earlier, *new, *new])
        earlier.extend(new)

    half.apply = again


def test_repeated_and_late_reports_change_nothing(start_tiny):
    engine = start_tiny(
        kv_cache_memory_bytes=14 * BLOCK * 2048,
        max_model_len=8 * BLOCK,
        kv_transfer_config=offload(64 << 20),
    )
    prompts = [tokens(f"repeated {i}", 4 * BLOCK + 9) for i in range(4)]
    cold = [engine.run(asking.ask_one, prompt) for prompt in prompts]
    assert engine.run(asking.reset, True)
    engine.run(repeat_reports)
    for _ in range(2):
        before = engine.run(asking.metrics)
        answers = [engine.run(asking.ask_one, prompt) for prompt in prompts]
        for one, other in zip(cold, answers, strict=True):
            assert_close(one, other)
    assert [answer.cached_tokens for answer in answers] == [4 * BLOCK] * 4
    after = engine.run(asking.metrics)
    loaded = "vllm:kvplugin_offload_loaded_tokens"
    assert after[loaded] - before[loaded] == 16 * BLOCK
    assert not any(engine.run(asking.balance).values())
    assert engine.run(asking.reset, True)


def test_in_processes_of_their_own_the_last_stores_end_without_a_next_request(
    start_tiny,
):
    engine: EngineHost = start_tiny(
        environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        kv_transfer_config=offload(64 << 20, copy_wait_ms=0),
    )
    prompt = tokens("last", 6 * BLOCK + 1)
    engine.run(asking.ask_one, prompt, 1)
    assert engine.run(asking.reset_within_a_second)
    loaded = engine.run(asking.ask_one, prompt)
    again = engine.run(asking.ask_one, prompt)

    assert loaded.cached_tokens == 6 * BLOCK
    assert_same(loaded, again)


def test_without_the_hybrid_manager_windows_are_served_as_full_attention(
    start_engine, gemma
):
    engine = start_engine(
        model=str(gemma),
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=64 << 20,
        disable_hybrid_kv_cache_manager=None,
        kv_transfer_config=offload(64 << 20),
    )
    prompt = tokens("one group", 3 * BLOCK + 5)
    cold = engine.run(asking.ask_one, prompt)
    local = engine.run(asking.ask_one, prompt)
    assert engine.run(asking.reset)
    loaded = engine.run(asking.ask_one, prompt)

    assert engine.run(asking.number_of_groups) == 1
    assert loaded.cached_tokens == 3 * BLOCK
    assert_same(local, loaded)
    assert_close(cold, loaded)


def test_counters_reach_the_user(start_tiny):
    """Though 0.19 asks the scheduler's side only beside a worker's, and before it has
    heard of the step."""
    engine = start_tiny(
        max_num_batched_tokens=2 * BLOCK, kv_transfer_config=offload(64 << 20)
    )
    prompt = tokens("counted", 5 * BLOCK + 3)
    engine.run(asking.ask_one, prompt)
    assert engine.run(asking.reset)
    engine.run(asking.ask_one, prompt)
    counted = engine.run(asking.metrics)

    assert counted["vllm:kvplugin_offload_stored_blocks"] == 5
    assert counted["vllm:kvplugin_offload_loaded_tokens"] == 5 * BLOCK
    assert counted["vllm:kvplugin_offload_host_blocks_stored"] == 5
