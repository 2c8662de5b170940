"""What models leave out of config.json, because their code knows it.

Keys that a saved config may lack mean the default of the model's configuration class
in Hugging Face's transformers (5.x, `models/*/configuration_*.py`).
"""

from collections.abc import Mapping
from typing import Any, Final

_GEMMA: Final = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
}
_GEMMA3: Final = {**_GEMMA, "sliding_window_pattern": 6}
_LLAMA4: Final = {
    "head_dim": 128,
    "attention_chunk_size": 8192,
    "no_rope_layer_interval": 4,
}
_QWEN: Final = {"use_sliding_window": False}

DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "cohere2": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "gemma2": {**_GEMMA, "sliding_window_pattern": 2},
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "gpt_oss": {"head_dim": 64, "sliding_window": 128, "sliding_window_pattern": 2},
    "llama4": _LLAMA4,
    "llama4_text": _LLAMA4,
    "olmo3": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "qwen2": {**_QWEN, "sliding_window": 4096, "max_window_layers": 28},
    "qwen2_moe": _QWEN,
    "qwen3": {
        **_QWEN,
        "head_dim": 128,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "qwen3_moe": _QWEN,
}
"""`model_type` -> keys of config.json and what they mean where they are missing."""

WINDOW_EVERYWHERE: Final = frozenset({"mistral", "mixtral", "phi3", "starcoder2"})
"""Values of `model_type` whose window, if they have one, is that of all layers."""
