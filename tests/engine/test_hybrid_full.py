"""Rarer set-ups of the models of `test_hybrid`: one engine each."""

from typing import Any

import pytest

from kvplugin.integration.demo.model import cache_folder
from tests.engine import asking
from tests.engine.asking import assert_close, assert_same
from tests.engine.host import EngineHost, offload
from tests.engine.hybrids import DEEPSEEK, GEMMA, GPT_OSS, HYBRIDS, QWEN3_NEXT, Hybrid

pytestmark = pytest.mark.full

NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
}

SETUPS: list[Any] = [
    *(
        pytest.param(model, {"blocks_per_chunk": 2}, {}, id=f"{model.name}-chunks")
        for model in HYBRIDS
    ),
    *(
        pytest.param(
            model,
            {"offload_prompt_only": False, "copy_wait_ms": 0},
            {"speculative_config": NGRAM},
            id=f"{model.name}-drafts",
        )
        for model in (GEMMA, QWEN3_NEXT)
    ),
    pytest.param(
        GPT_OSS,
        {},
        {"environment": {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}},
        id="processes",
    ),
    *(
        pytest.param(
            model,
            {},
            {"prefix_cache_retention_interval": model.block},
            id=f"{model.name}-retained",
        )
        for model in (GEMMA, QWEN3_NEXT)
    ),
    pytest.param(DEEPSEEK, {"min_load_tokens": 64}, {}, id="deepseek-least"),
]


@pytest.mark.parametrize(("model", "settings", "arguments"), SETUPS)
def test_what_is_loaded_is_what_was_computed(
    start_engine: Any,
    model: Hybrid,
    settings: dict[str, Any],
    arguments: dict[str, Any],
) -> None:
    engine = start_engine(
        **model.arguments(cache_folder() / "tests"),
        kv_transfer_config=offload(64 << 20, **settings),
        **arguments,
    )
    check_loads(engine, model, settings.get("blocks_per_chunk", 1))
    engine.close()


def check_loads(engine: EngineHost, model: Hybrid, blocks_per_chunk: int) -> None:
    """Cold, and loaded into an empty engine, of two questions about one document."""
    unit = model.unit * blocks_per_chunk
    document = model.prompt("document", 4, 40)
    one, other = ([*document, *model.prompt(name, 0, 50)] for name in ("one", "other"))
    cold = [engine.run(asking.ask_one, prompt, 8) for prompt in (one, other)]
    for _ in range(2):
        assert engine.run(asking.reset_within_a_second)
        for prompt, expected in zip((one, other), cold, strict=True):
            loaded = engine.run(asking.ask_one, prompt, 8)
            assert loaded.cached_tokens >= len(document) // unit * unit
            assert_close(expected, loaded, model.noise)
    local = engine.run(asking.ask_one, one, 8)
    again = engine.run(asking.ask_one, one, 8)
    assert_same(local, again)


@pytest.mark.parametrize("model", HYBRIDS, ids=lambda hybrid: hybrid.name)
def test_answers_survive_where_host_memory_is_short_too(
    start_engine: Any, model: Hybrid
) -> None:
    engine = start_engine(
        **model.arguments(cache_folder() / "tests"),
        kv_transfer_config=offload(model.kv_bytes // 2),
    )
    prompts = [model.prompt(f"pressure {i // 2}", 2, 10 + 30 * i) for i in range(6)]
    alone = [engine.run(asking.ask_one, prompt, model.block) for prompt in prompts]
    for _ in range(2):
        together = engine.run(asking.ask, prompts, model.block)
        for one, other in zip(alone, together, strict=True):
            assert_close(one, other, model.noise)
    assert engine.run(asking.preemptions) > 0
    assert engine.run(asking.metrics)["vllm:kvplugin_offload_evicted_blocks"] > 0
    assert not any(engine.run(asking.balance).values())
    assert engine.run(asking.reset, True)
    assert engine.run(asking.number_of_groups) == model.groups
    engine.close()
