"""A small vLLM-style engine in torch that adopts the kvplugin core.

Read in this order: `config.py` (what a model and an engine are), `layers/` (the kinds
of layers), `history.py` (the one seam between them and memory), `model.py` and
`dense.py` (a decoder, and its plain forward without any cache), `paged.py` and
`states.py` (the same histories in KV blocks), `runner.py` and `ranks.py` (workers),
`engine.py` (scheduler, workers and users together), `draft_model.py` and `drafter.py`
(a drafter with KV of its own).
"""

from kvplugin.integration.reference.config import (
    EngineConfig,
    LayerConfig,
    ModelConfig,
    SamplingParams,
)
from kvplugin.integration.reference.dense import dense_generate, dense_logits
from kvplugin.integration.reference.draft_model import (
    DraftModel,
    dense_drafts,
    random_draft_model,
    target_hidden,
)
from kvplugin.integration.reference.drafter import AttentionDrafter
from kvplugin.integration.reference.engine import Answer, ReferenceEngine
from kvplugin.integration.reference.model import Model
from kvplugin.integration.reference.weights import load_model, random_model

__all__ = [
    "Answer",
    "AttentionDrafter",
    "DraftModel",
    "EngineConfig",
    "LayerConfig",
    "Model",
    "ModelConfig",
    "ReferenceEngine",
    "SamplingParams",
    "dense_drafts",
    "dense_generate",
    "dense_logits",
    "load_model",
    "random_draft_model",
    "random_model",
    "target_hidden",
]
