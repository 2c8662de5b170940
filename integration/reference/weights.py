"""Weights: random ones from a seed, or those of a Llama checkpoint."""

import json
import math
from pathlib import Path
from typing import Any, Final

import torch

from kvplugin.errors import ConfigError
from kvplugin.integration.reference.config import (
    LayerConfig,
    ModelConfig,
    torch_dtype,
)
from kvplugin.integration.reference.layers import WeightShape
from kvplugin.integration.reference.model import Model, weight_shapes


def random_model(
    config: ModelConfig,
    seed: int = 0,
    *,
    depth_scale: float = 1.0,
    device: torch.device | str = "cpu",
) -> Model:
    """A random model; equal seeds give equal weights on every device.

    Args:
        config: of the model.
        seed: of the weights.
        depth_scale: each layer adds this much of what the one before it adds: below 1
            later layers change little, and a drafter of one layer is often right.
        device: where the weights go.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in weight_shapes(config).items():
        weight = _random(shape, generator)
        if shape.is_output:
            weight *= depth_scale ** int(name.split(".")[1])
        weights[name] = weight.to(config.torch_dtype).to(device)
    return Model(config, weights)


def _random(shape: WeightShape, generator: torch.Generator) -> torch.Tensor:
    """In fp64, so that models of all dtypes have the same weights, rounded."""
    values = torch.randn(shape.shape, generator=generator, dtype=torch.float64)
    if not shape.fan_in:
        return 1 + values / 8  # a norm's weight
    return values / math.sqrt(shape.fan_in)


_NAMES: Final = {
    "mix_norm": "input_layernorm",
    "feed_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "mixer.q": "self_attn.q_proj",
    "mixer.k": "self_attn.k_proj",
    "mixer.v": "self_attn.v_proj",
    "mixer.o": "self_attn.o_proj",
}
_TRANSPOSED: Final = ("down", "mixer.o")
"""Here the dimension that ranks share comes first."""


def load_model(
    folder: Path, dtype: str = "float32", device: torch.device | str = "cpu"
) -> Model:
    """A Llama checkpoint of Hugging Face: `config.json` and safetensors.

    Args:
        folder: with both.
        dtype: to compute in.
        device: where the weights go.

    Raises:
        ConfigError: it is another architecture, or has what this decoder lacks.
    """
    config = _llama_config(json.loads((folder / "config.json").read_text()), dtype)
    found = _read_tensors(folder)
    weights = {}
    for name, shape in weight_shapes(config).items():
        weight = found[_stored_name(name)].to(torch_dtype(dtype, "dtype"))
        if name.endswith(_TRANSPOSED):
            weight = weight.T
        weights[name] = weight.reshape(shape.shape).contiguous().to(device)
    return Model(config, weights)


def _llama_config(stored: dict[str, Any], dtype: str) -> ModelConfig:
    if stored.get("model_type") != "llama" or stored.get("attention_bias"):
        raise ConfigError(
            f"model_type {stored.get('model_type')!r}: only Llama checkpoints without "
            "attention_bias can be loaded"
        )
    rope = stored.get("rope_parameters") or {"rope_theta": stored.get("rope_theta")}
    if rope.get("rope_type", "default") != "default" or stored.get("rope_scaling"):
        raise ConfigError(f"scaled rotary positions are not supported: {rope}")
    heads = stored["num_attention_heads"]
    return ModelConfig(
        vocab_size=stored["vocab_size"],
        hidden_size=stored["hidden_size"],
        num_heads=heads,
        num_kv_heads=stored["num_key_value_heads"],
        head_size=stored.get("head_dim") or stored["hidden_size"] // heads,
        intermediate_size=stored["intermediate_size"],
        layers=(LayerConfig(),) * stored["num_hidden_layers"],
        rope_theta=float(rope["rope_theta"]),
        rms_eps=stored["rms_norm_eps"],
        tie_embeddings=stored["tie_word_embeddings"],
        dtype=dtype,
    )


def _stored_name(name: str) -> str:
    whole = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
    if name in whole:
        return f"{whole[name]}.weight"
    _, number, own = name.split(".", 2)
    return f"model.layers.{number}.{_NAMES[own]}.weight"


def _read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors
