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
from kvplugin.replay.model_families import DEFAULTS, WINDOW_EVERYWHERE

_MOST_LAYERS: Final = 4096

_Size = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]

_REFUSED_KEYS: Final = (
    "attn_layer_period",
    "hybrid_override_pattern",
    "index_topk",
    "layers_block_type",
    "linear_attn_config",
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
    model_type: str | None = None
    hidden_size: _Size | None = None
    head_dim: _Size | None = None
    num_key_value_heads: _Size | None = None
    layer_types: tuple[str, ...] | None = None
    sliding_window: _Size | None = None
    sliding_window_pattern: _Size | None = None
    """Every so many layers one has full attention."""
    use_sliding_window: bool | None = None
    max_window_layers: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Layers before those with a window."""
    attention_chunk_size: _Size | None = None
    no_rope_layers: tuple[int, ...] | None = None
    """1 for each layer with chunks, 0 for each with full attention; may be empty."""
    no_rope_layer_interval: _Size | None = None
    """Where that is not said: every so many layers one has full attention."""
    kv_lora_rank: _Size | None = None
    qk_rope_head_dim: _Size | None = None

    def kinds(self) -> Sequence[str]:
        """Kind of each layer.

        Raises:
            ConfigError: the config does not say it, or has a name that is not known.
        """
        count = self.num_hidden_layers
        if self.kv_lora_rank:
            return ["mla"] * count
        if self.layer_types is not None:
            return self._named_kinds(self.layer_types)
        if self.attention_chunk_size:
            return self._chunked_kinds()
        if not self.sliding_window or self.use_sliding_window is False:
            return ["full_attention"] * count
        return self._windowed_kinds()

    def _named_kinds(self, names: Sequence[str]) -> Sequence[str]:
        for name in names:
            if name not in _KINDS:
                raise unknown_name("layer type", name, _KINDS, "layer_types")
        _check_number("layer_types", names, self.num_hidden_layers)
        return [_KINDS[name] for name in names]

    def _chunked_kinds(self) -> Sequence[str]:
        count, every = self.num_hidden_layers, self.no_rope_layer_interval
        if every is None:
            raise _unclear("attention_chunk_size", "layer_types")
        chunked = self.no_rope_layers or [(i + 1) % every for i in range(count)]
        _check_number("no_rope_layers", chunked, count)
        return ["chunked_local" if each else "full_attention" for each in chunked]

    def _windowed_kinds(self) -> Sequence[str]:
        layers = range(self.num_hidden_layers)
        if every := self.sliding_window_pattern:
            windowed = [bool((i + 1) % every) for i in layers]
        elif self.use_sliding_window and self.max_window_layers is not None:
            windowed = [i >= self.max_window_layers for i in layers]
        elif self.model_type in WINDOW_EVERYWHERE:
            windowed = [True for _ in layers]
        else:
            raise _unclear("sliding_window", "layer_types or sliding_window_pattern")
        return ["sliding_window" if each else "full_attention" for each in windowed]

    def heads(self) -> dict[str, int]:
        """Heads of keys and values, as `kvplugin.plan` names them.

        Raises:
            ConfigError: the config does not say how large they are.
        """
        heads = self.num_attention_heads
        size = self.head_dim or (self.hidden_size or 0) // heads
        if not size:
            raise ConfigError(
                f"head_dim, or a hidden_size of {heads} at least, is missing"
            )
        return {
            "num_key_value_heads": self.num_key_value_heads or heads,
            "head_dim": size,
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
        content = _text_part(json.loads(path.read_bytes()))
        if refused := [key for key in _REFUSED_KEYS if content.get(key)]:
            raise ConfigError(
                f"has {', '.join(refused)}: layers with recurrent states or sparse "
                f"attention are known by the model's name only"
            )
        config = msgspec.convert(content, ModelConfig)
        return _shape(path, config)
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise ConfigError(f"model {path}: {error}") from error


def _text_part(content: Any) -> dict[str, Any]:
    """The keys of the text model, with those that its family leaves out."""
    whole = msgspec.convert(content, dict[str, Any])
    part = msgspec.convert(whole.get("text_config", whole), dict[str, Any])
    family = part.get("model_type", whole.get("model_type"))
    defaults = DEFAULTS.get(family, {}) if isinstance(family, str) else {}
    return {**defaults, "model_type": family, **part}


def _unclear(key: str, missing: str) -> ConfigError:
    return ConfigError(f"{key}, but not which layers it is for: add {missing}")


def _check_number(key: str, values: Sequence[object], layers: int) -> None:
    if len(values) != layers:
        raise ConfigError(f"{len(values)} {key} for {layers} layers")


def _shape(path: Path, config: ModelConfig) -> ModelShape:
    facts = config.facts()
    places = defaultdict(list)
    for place, kind in enumerate(config.kinds()):
        places[kind].append(place)
    needed = {"sliding_window": "window", "chunked_local": "chunk"}
    for kind in places:
        if kind in needed and not facts[needed[kind]]:
            raise ConfigError(f"{kind} layers without their size")
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
