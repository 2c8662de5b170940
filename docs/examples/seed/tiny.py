"""What the examples share: a random decoder of a few layers, and an engine for it."""

from typing import Any

from kvplugin.integration.reference import (
    EngineConfig,
    LayerConfig,
    Model,
    ModelConfig,
    ReferenceEngine,
    random_model,
)

FULL = LayerConfig()
PROMPT = [(7 * i + 3) % 61 for i in range(200)]


def window(size: int) -> LayerConfig:
    return LayerConfig(kind="sliding_window", window=size)


def make_model(*layers: LayerConfig) -> Model:
    return random_model(
        ModelConfig(
            vocab_size=61,
            hidden_size=32,
            num_heads=4,
            num_kv_heads=2,
            head_size=8,
            intermediate_size=48,
            tie_embeddings=False,
            layers=layers,
        )
    )


def make_engine(*layers: LayerConfig, **settings: Any) -> ReferenceEngine:
    defaults = {"block_size": 4, "num_blocks": 200, "record_logits": True}
    return ReferenceEngine(make_model(*layers), EngineConfig(**(defaults | settings)))


def rows(engine: ReferenceEngine, req_id: str) -> tuple[list[int], ...]:
    """The request's block ids, a row a group."""
    return engine.manager.get_block_ids(req_id)
