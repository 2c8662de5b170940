"""Memory pressure: preemption, tiny host memory, coarse chunks, many requests."""

from typing import Any

import pytest

from tests.engine import asking
from tests.engine.asking import BLOCK, assert_close
from tests.engine.host import offload
from tests.engine.prompts import tokens

GENERATED = 140
"""Tokens of each answer: more than a block."""
KV_BYTES_PER_BLOCK = 4 * 2 * 2 * 64 * 2 * BLOCK


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Eight prompts of two to four blocks, in pairs that share two blocks."""
    return [
        tokens(f"pressure {i // 2}", 2 * BLOCK) + tokens(f"own {i}", 40 + 30 * i)
        for i in range(8)
    ]


@pytest.fixture(scope="module")
def expected(start_tiny: Any, prompts: list[list[int]]) -> list[asking.Answer]:
    """Answers of vLLM with room for everything and without kvplugin."""
    return start_tiny().run(asking.ask, prompts, GENERATED)


@pytest.mark.parametrize(
    ("settings", "moved"),
    [
        pytest.param({"cpu_bytes": 64 << 20}, "loaded_tokens", id="room for all"),
        pytest.param(
            {"cpu_bytes": 7 * KV_BYTES_PER_BLOCK}, "evicted_blocks", id="seven blocks"
        ),
        pytest.param(
            {"cpu_bytes": 64 << 20, "blocks_per_chunk": 2},
            "loaded_tokens",
            id="chunks of two blocks",
        ),
        pytest.param(
            {"cpu_bytes": 64 << 20, "offload_prompt_only": False, "copy_wait_ms": 0},
            "loaded_tokens",
            id="generated blocks too, never waiting",
        ),
    ],
)
def test_answers_survive_preemption(start_tiny, prompts, expected, settings, moved):
    engine = start_tiny(
        kv_cache_memory_bytes=12 * KV_BYTES_PER_BLOCK,
        max_model_len=8 * BLOCK,
        kv_transfer_config=offload(**settings),
    )
    for _ in range(2):
        for one, other in zip(
            expected, engine.run(asking.ask, prompts, GENERATED), strict=True
        ):
            assert_close(one, other)
    assert engine.run(asking.preemptions) > 0
    assert engine.run(asking.metrics)[f"vllm:kvplugin_offload_{moved}"] > 0
    assert not any(engine.run(asking.balance).values())
    assert engine.run(asking.reset, True)
    engine.close()
