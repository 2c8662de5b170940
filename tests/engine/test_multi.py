"""Our connector beside others, in vLLM's `MultiConnector`."""

from pathlib import Path
from typing import Any

import pytest

from tests.engine import asking, sibling
from tests.engine.asking import BLOCK, assert_close, assert_same
from tests.engine.host import offload
from tests.engine.prompts import tokens

PROMPT = tokens("multi", 3 * BLOCK + 9)
OURS = offload(64 << 20)
LATE = {
    "kv_connector": "LateConnector",
    "kv_connector_module_path": "tests.engine.sibling",
    "kv_role": "kv_both",
}


def example(folder: Path) -> dict[str, Any]:
    """vLLM's own connector to a folder: synchronous, for models with one group."""
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }


def multi(*connectors: dict[str, Any]) -> dict[str, Any]:
    """`kv_transfer_config` of several."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": list(connectors)},
    }


def assert_nothing_is_held(engine: Any) -> None:
    for balance in engine.run(asking.balances):
        assert not any(balance.values())


def test_before_vllms_own_connector_it_serves_the_hits(start_tiny, tmp_path):
    engine = start_tiny(kv_transfer_config=multi(OURS, example(tmp_path)))
    engine.run(asking.ask_one, PROMPT)
    local = engine.run(asking.ask_one, PROMPT)
    assert engine.run(asking.reset)
    loaded = engine.run(asking.ask_one, PROMPT)

    assert loaded.cached_tokens == 3 * BLOCK
    assert_same(local, loaded)
    assert engine.run(asking.metrics)["vllm:kvplugin_offload_loaded_tokens"] > 0
    assert_nothing_is_held(engine)
    engine.close()


def test_behind_it_our_stores_hold_what_it_has_loaded(start_tiny, tmp_path):
    engine = start_tiny(kv_transfer_config=multi(example(tmp_path), OURS))
    engine.run(asking.ask_one, PROMPT)
    local = engine.run(asking.ask_one, PROMPT)
    assert engine.run(asking.reset, True)
    from_disk = engine.run(asking.ask_one, PROMPT)
    assert from_disk.cached_tokens == 3 * BLOCK
    assert engine.run(asking.reset)
    for file in tmp_path.iterdir():
        file.rename(file.with_suffix(".gone"))
    loaded = engine.run(asking.ask_one, PROMPT)

    assert loaded.cached_tokens == 3 * BLOCK
    assert_same(local, from_disk)
    assert_same(local, loaded)
    assert_nothing_is_held(engine)
    engine.close()


def test_two_of_ours_do_not_get_in_each_others_way(start_tiny):
    engine = start_tiny(kv_transfer_config=multi(OURS, offload(32 << 20)))
    engine.run(asking.ask_one, PROMPT)
    local = engine.run(asking.ask_one, PROMPT)
    assert_nothing_is_held(engine)
    assert engine.run(asking.reset)
    loaded = engine.run(asking.ask_one, PROMPT)

    assert loaded.cached_tokens == 3 * BLOCK
    assert_same(local, loaded)
    assert_nothing_is_held(engine)
    assert engine.run(asking.reset, True)
    assert engine.run(asking.ask_one, PROMPT).cached_tokens == 0
    engine.close()


def test_blocks_that_another_connector_has_not_filled_are_not_stored(start_tiny):
    """Scenario: the other one's load is under way for some steps."""
    engine = start_tiny(kv_transfer_config=multi(LATE, OURS))
    engine.run(asking.ask_one, PROMPT)
    local = engine.run(asking.ask_one, PROMPT)
    assert engine.run(asking.reset, True)
    engine.run(sibling.offer, 3 * BLOCK)
    touched, answer = engine.run(sibling.ask_while_held, PROMPT, 5)
    assert touched == 0
    assert answer.cached_tokens == 3 * BLOCK
    assert_same(local, answer)

    engine.run(sibling.offer, 0)
    assert engine.run(asking.reset)
    loaded = engine.run(asking.ask_one, PROMPT)
    assert loaded.cached_tokens == 3 * BLOCK
    assert_same(local, loaded)
    assert_nothing_is_held(engine)
    engine.close()


@pytest.mark.full
def test_beside_a_connector_without_groups_windows_are_kept_whole(
    start_engine, gemma, tmp_path
):
    """vLLM then puts all layers in one group, as if all were full attention."""
    engine = start_engine(
        model=str(gemma),
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=64 << 20,
        kv_transfer_config=multi(OURS, example(tmp_path)),
    )
    cold = engine.run(asking.ask_one, PROMPT)
    local = engine.run(asking.ask_one, PROMPT)
    assert engine.run(asking.reset)
    loaded = engine.run(asking.ask_one, PROMPT)

    assert engine.run(asking.number_of_groups) == 1
    assert loaded.cached_tokens == 3 * BLOCK
    assert_same(local, loaded)
    assert_close(cold, loaded)
