"""The layers of a model from its Hugging Face config.json.

Attention only: full, windows, chunks and latent (MLA). What recurrent layers and sparse
attention keep depends on more than their config says; such models are refused here, and
the public ones are in `kvplugin.plan` by name.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from kvplugin.errors import ConfigError, unknown_name
from kvplugin.plan import LayerKind, ModelShape

_MOST_LAYERS: Final = 4096

_Size = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]

_REFUSED_KEYS: Final = (
    "attn_layer_period",
    "hybrid_override_pattern",
    "index_topk",
    "layers_block_type",
    "linear_num_key_heads",
    "mamba_d_state",
    "ssm_state_size",
    "state_size",
)
"""Keys of models with recurrent states or sparse attention."""

_KINDS: Final[Mapping[str, str]] = {
    "full_attention": "full_attention",
    "sliding_attention": "sliding_window",
    "chunked_attention": "chunked_local",
}
"""Names in `layer_types` -> kinds of `kvplugin.plan`."""


class ModelConfig(msgspec.Struct, frozen=True):
    """Keys of config.json that are read, in its own meaning."""

    num_hidden_layers: Annotated[int, msgspec.Meta(ge=1, le=_MOST_LAYERS)]
    num_attention_heads: _Size
    hidden_size: _Size | None = None
    head_dim: _Size | None = None
    num_key_value_heads: _Size | None = None
    layer_types: tuple[str, ...] | None = None
    sliding_window: _Size | None = None
    sliding_window_pattern: _Size | None = None
    """Every so many layers one has full attention."""
    use_sliding_window: bool | None = None
    attention_chunk_size: _Size | None = None
    kv_lora_rank: _Size | None = None
    qk_rope_head_dim: _Size | None = None

    def kinds(self) -> Sequence[str]:
        """Kind of each layer.

        Raises:
            ConfigError: `layer_types` has a name that is not known here, or does not
                name each layer.
        """
        count = self.num_hidden_layers
        if self.kv_lora_rank:
            return ["mla"] * count
        if self.layer_types is not None:
            for name in self.layer_types:
                if name not in _KINDS:
                    raise unknown_name("layer type", name, _KINDS, "layer_types")
            if len(self.layer_types) != count:
                raise ConfigError(
                    f"{len(self.layer_types)} layer_types for {count} layers"
                )
            return [_KINDS[name] for name in self.layer_types]
        if not self.sliding_window or self.use_sliding_window is False:
            return ["full_attention"] * count
        every = self.sliding_window_pattern
        return [
            "full_attention" if every and not (i + 1) % every else "sliding_window"
            for i in range(count)
        ]

    def heads(self) -> dict[str, int]:
        """Heads of keys and values, as `kvplugin.plan` names them."""
        heads = self.num_attention_heads
        return {
            "num_key_value_heads": self.num_key_value_heads or heads,
            "head_dim": self.head_dim or (self.hidden_size or 0) // heads,
        }

    def facts(self) -> dict[str, Any]:
        """The sizes of its kinds of layers."""
        return {
            "window": self.sliding_window,
            "chunk": self.attention_chunk_size,
            "latent": (self.kv_lora_rank or 0) + (self.qk_rope_head_dim or 0),
        }


def read_model(path: Path) -> ModelShape:
    """The model that a config.json describes; of several modalities, the text part.

    Raises:
        ConfigError: the file cannot be read, or describes layers that are not known
            here.
    """
    try:
        content = json.loads(path.read_bytes())
        if isinstance(content, dict):
            content = content.get("text_config", content)
        config = msgspec.convert(content, ModelConfig)
        kinds = config.kinds()
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise ConfigError(f"model {path}: {error}") from error
    if refused := [key for key in _REFUSED_KEYS if content.get(key)]:
        raise ConfigError(
            f"model {path} has {', '.join(refused)}: layers with recurrent states or "
            f"sparse attention are known by the model's name only"
        )
    return _shape(path, kinds, config)


def _shape(path: Path, kinds: Sequence[str], config: ModelConfig) -> ModelShape:
    facts = config.facts()
    places = defaultdict(list)
    for place, kind in enumerate(kinds):
        places[kind].append(place)
    needed = {"sliding_window": "window", "chunked_local": "chunk"}
    for kind in places:
        if kind in needed and not facts[needed[kind]]:
            raise ConfigError(f"model {path}: {kind} layers without their size")
    layers = (
        LayerKind(kind, len(indices), facts, tuple(indices))
        for kind, indices in places.items()
    )
    return ModelShape(
        name=str(path),
        hf_id="",
        family="",
        status="",
        config=config.heads(),
        layers=tuple(layers),
        sources=(),
        derived={},
    )
