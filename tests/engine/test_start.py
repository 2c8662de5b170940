"""Ways to start, ways to refuse, and starting without doing anything."""

import re
from typing import Any

import pytest

from tests.engine import asking, faults
from tests.engine.asking import BLOCK, assert_close, assert_same
from tests.engine.host import EngineStartError, offload
from tests.engine.prompts import tokens
from tests.engine.version import is_019

PROMPT = tokens("start", 3 * BLOCK + 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cpu_bytes": 1 << 30}, "Did you mean 'cpu_bytes_to_use'"),
        ({"cpu_bytes_to_use": 1000}, "cpu_bytes_to_use=1000 holds no chunk"),
    ],
)
def test_a_wrong_setting_ends_the_start_with_a_message(start_tiny, settings, message):
    config = offload(1 << 30) | {"kv_connector_extra_config": settings}
    with pytest.raises(EngineStartError, match=re.escape(message)):
        start_tiny(kv_transfer_config=config)


def idles(engine: Any) -> None:
    """Right answers, no loads, and no block held."""
    first = engine.run(asking.ask_one, PROMPT)
    assert engine.run(asking.reset)
    second = engine.run(asking.ask_one, PROMPT)
    assert second.cached_tokens == 0
    assert_same(first, second)
    assert engine.run(asking.reset, True)


def test_on_start_error_disable_runs_without_offload(start_tiny):
    engine = start_tiny(
        kv_transfer_config=offload(1 << 60, on_start_error="disable"),
    )
    idles(engine)
    assert "kvplugin offload is disabled" in engine.log.read_text()


def test_a_rank_that_cannot_start_stores_and_loads_nothing(start_tiny):
    engine = start_tiny(
        prepare=faults.no_host_memory,
        kv_transfer_config=offload(64 << 20, on_start_error="disable"),
    )
    idles(engine)
    assert not any(engine.run(asking.balance).values())


def test_an_unknown_layout_ends_the_start_by_default(start_tiny):
    with pytest.raises(EngineStartError, match="KV layout refused"):
        start_tiny(prepare=faults.no_host_memory, kv_transfer_config=offload(64 << 20))


def test_the_environment_can_switch_it_off(start_tiny):
    engine = start_tiny(
        environment={"KVPLUGIN_DISABLE": "1"},
        kv_transfer_config=offload(64 << 20)
        | {"kv_connector_extra_config": {"a_key_of": "another version"}},
    )
    idles(engine)
    assert "KVPLUGIN_DISABLE is set" in engine.log.read_text()


def test_a_module_path_works_where_plugins_are_not_allowed(start_tiny):
    config = offload(64 << 20) | {
        "kv_connector_module_path": "kvplugin.integration.vllm.offload"
    }
    engine = start_tiny(environment={"VLLM_PLUGINS": ""}, kv_transfer_config=config)
    engine.run(asking.ask_one, PROMPT)
    assert engine.run(asking.reset)
    assert engine.run(asking.ask_one, PROMPT).cached_tokens == 3 * BLOCK


def test_in_processes_of_their_own_scheduler_and_worker_find_each_other(start_tiny):
    engine = start_tiny(
        environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        kv_transfer_config=offload(64 << 20),
    )
    engine.run(asking.ask_one, PROMPT)
    local = engine.run(asking.ask_one, PROMPT)
    assert engine.run(asking.reset_within_a_second)
    loaded = engine.run(asking.ask_one, PROMPT)

    assert loaded.cached_tokens == 3 * BLOCK
    assert_same(local, loaded)
    assert engine.run(asking.metrics)["vllm:kvplugin_offload_loaded_tokens"] > 0
    assert engine.run(asking.reset_within_a_second)
    log = engine.log.read_text()
    assert re.search(r"\(EngineCore pid=\d+\).* kvplugin offload: \d+ blocks", log)
    worker = "EngineCore" if is_019() else "Worker"  # 0.19 makes a process of several
    assert re.search(rf"\({worker} pid=\d+\).* kvplugin offload: rank 0", log)


@pytest.mark.full
def test_two_ranks_each_keep_their_part(start_tiny):
    engine = start_tiny(
        environment={
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        },
        tensor_parallel_size=2,
        kv_transfer_config=offload(64 << 20),
    )
    engine.run(asking.ask_one, PROMPT)
    local = engine.run(asking.ask_one, PROMPT)
    assert engine.run(asking.reset_within_a_second)
    loaded = engine.run(asking.ask_one, PROMPT)

    assert loaded.cached_tokens == 3 * BLOCK
    assert_same(local, loaded)
    log = engine.log.read_text()
    assert {rank for rank in "01" if f"kvplugin offload: rank {rank} keeps" in log} == {
        "0",
        "1",
    }


def test_with_local_caching_off_host_memory_still_serves(start_tiny):
    engine = start_tiny(
        enable_prefix_caching=False, kv_transfer_config=offload(64 << 20)
    )
    first = engine.run(asking.ask_one, PROMPT)
    second = engine.run(asking.ask_one, PROMPT)
    third = engine.run(asking.ask_one, PROMPT)

    assert (first.cached_tokens, second.cached_tokens) == (0, 3 * BLOCK)
    assert_close(first, second)
    assert_same(second, third)
    assert not any(engine.run(asking.balance).values())


@pytest.mark.skipif(is_019(), reason="0.19.1 does not start the model on a CPU")
def test_a_model_whose_states_vllm_does_not_keep_is_left_alone_by_name(
    start_engine, qwen3_next
):
    engine = start_engine(
        model=str(qwen3_next),
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=64 << 20,
        enable_prefix_caching=False,
        kv_transfer_config=offload(64 << 20),
    )
    idles(engine)
    assert engine.run(asking.number_of_groups) > 1
    log = engine.log.read_text()
    assert log.count("kvplugin offload is idle: group 0 is of kind mamba") == 1
