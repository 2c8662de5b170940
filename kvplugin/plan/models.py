"""Shapes of public models: which layers they have, and what those keep.

`data/models.json` holds facts with their sources; `layers_of` turns a model into specs.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Final

from kvplugin.errors import ConfigError, unknown_name
from kvplugin.plan.states import state_shapes
from kvplugin.spec import (
    FP8_DS_MLA,
    MAMBA_CACHE_MODES,
    ChunkedLocalAttentionSpec,
    Dtype,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    check_positive,
)

INDEXER_SCALE_BYTES: Final = 4
"""The indexer of sparse MLA keeps an fp8 key and one fp32 scale a token."""

MAMBA_KINDS: Final = ("mamba1", "mamba2", "gated_deltanet", "lightning_linear")


@dataclass(frozen=True)
class LayerKind:
    """Layers of a model that are alike."""

    kind: str
    count: int
    facts: Mapping[str, Any]
    """Window, chunk, latent and head sizes, as the data file has them."""
    indices: tuple[int, ...] = ()
    """Their positions; empty takes those that are left."""


@dataclass(frozen=True)
class ModelShape:
    """One model of the data file."""

    name: str
    hf_id: str
    family: str
    status: str
    """How well the facts are confirmed (``_readme`` of the data file)."""
    config: Mapping[str, Any]
    """Fields of the model's config.json."""
    layers: tuple[LayerKind, ...]
    sources: tuple[str, ...]
    derived: Mapping[str, int]
    """Bytes computed apart from this code, to check against."""

    @property
    def max_model_len(self) -> int | None:
        """Longest sequence the model was made for, where known."""
        length: int | None = self.config.get("max_position_embeddings")
        return length


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """How an engine keeps the cache of a model."""

    block_size: int = 16
    dtype: Dtype = "bfloat16"
    """Keys and values."""
    cache_dtype_str: str | None = None
    """The engine's name of the format; ``fp8_ds_mla`` for sparse MLA in fp8."""
    conv_dtype: Dtype = "bfloat16"
    ssm_dtype: Dtype = "float32"
    mamba_cache_mode: str = "none"
    num_speculative_blocks: int = 0
    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ConfigError: naming the field.
        """
        check_positive(self, "block_size", "tensor_parallel_size")
        check_positive(self, "num_speculative_blocks", least=0)
        if self.mamba_cache_mode not in MAMBA_CACHE_MODES:
            key = "CacheOptions.mamba_cache_mode"
            mode = self.mamba_cache_mode
            raise unknown_name("Mamba cache mode", mode, MAMBA_CACHE_MODES, key)


@cache
def load_models() -> Mapping[str, ModelShape]:
    """All models of the data file, by name."""
    text = files("kvplugin.plan").joinpath("data/models.json").read_text("utf-8")
    models = json.loads(text)["models"]
    return {name: _model(name, facts) for name, facts in models.items()}


def load_model(name: str) -> ModelShape:
    """The model of this name.

    Raises:
        ConfigError: there is none; the message names those there are.
    """
    models = load_models()
    if name not in models:
        raise unknown_name("model", name, models, "model")
    return models[name]


def _model(name: str, facts: Mapping[str, Any]) -> ModelShape:
    return ModelShape(
        name=name,
        hf_id=facts["hf_id"],
        family=facts["family"],
        status=facts["status"],
        config=facts["config"],
        layers=tuple(
            LayerKind(
                layer["kind"], layer["count"], layer, tuple(layer.get("indices", ()))
            )
            for layer in facts["layers"]
        ),
        sources=tuple(facts["sources"]),
        derived=facts["derived"],
    )


def layers_of(model: ModelShape, options: CacheOptions) -> dict[str, KVCacheSpec]:
    """Layer name -> spec, in the order of the model; layers without cache left out.

    Raises:
        ConfigError: heads do not divide by the tensor-parallel size.
    """
    kinds = _kind_at_each_position(model)
    specs: dict[str, KVCacheSpec] = {}
    for position, layer in enumerate(kinds):
        if make := _MAKERS.get(layer.kind):
            specs[f"layers.{position}.{layer.kind}"] = make(model, layer, options)
        if layer.kind == "sparse_mla":
            specs[f"layers.{position}.indexer"] = _indexer(layer, options)
    return specs


def _kind_at_each_position(model: ModelShape) -> list[LayerKind]:
    placed = {i: layer for layer in model.layers for i in layer.indices}
    left = [kind for kind in model.layers if not kind.indices]
    rest = iter([kind for kind in left for _ in range(kind.count)])
    total = sum(layer.count for layer in model.layers)
    return [placed[i] if i in placed else next(rest) for i in range(total)]


def _heads(model: ModelShape, layer: LayerKind, options: CacheOptions) -> int:
    """Heads of a rank; with more ranks than heads each keeps one, as in vLLM."""
    heads: int = layer.facts.get("kv_heads", model.config["num_key_value_heads"])
    ranks = options.tensor_parallel_size
    if heads % ranks and ranks % heads:
        raise ConfigError(
            f"{model.name} has {heads} KV heads, which tensor_parallel_size {ranks} "
            "does not divide"
        )
    return max(1, heads // ranks)


def _head_size(model: ModelShape, layer: LayerKind) -> int:
    size: int = layer.facts.get("head_dim", model.config["head_dim"])
    return size


def _full(model: ModelShape, layer: LayerKind, options: CacheOptions) -> KVCacheSpec:
    return FullAttentionSpec(
        block_size=options.block_size,
        num_kv_heads=_heads(model, layer, options),
        head_size=_head_size(model, layer),
        dtype=options.dtype,
    )


def _window(model: ModelShape, layer: LayerKind, options: CacheOptions) -> KVCacheSpec:
    return SlidingWindowSpec(
        block_size=options.block_size,
        num_kv_heads=_heads(model, layer, options),
        head_size=_head_size(model, layer),
        dtype=options.dtype,
        sliding_window=layer.facts["window"],
    )


def _chunk(model: ModelShape, layer: LayerKind, options: CacheOptions) -> KVCacheSpec:
    return ChunkedLocalAttentionSpec(
        block_size=options.block_size,
        num_kv_heads=_heads(model, layer, options),
        head_size=_head_size(model, layer),
        dtype=options.dtype,
        attention_chunk_size=layer.facts["chunk"],
    )


def _mla(model: ModelShape, layer: LayerKind, options: CacheOptions) -> KVCacheSpec:
    sparse = layer.kind == "sparse_mla"
    if options.cache_dtype_str == FP8_DS_MLA and not sparse:
        raise ConfigError(f"cache_dtype_str {FP8_DS_MLA!r} is for sparse MLA only")
    return MLAAttentionSpec(
        block_size=options.block_size,
        num_kv_heads=1,
        head_size=layer.facts["latent"],
        dtype=options.dtype,
        cache_dtype_str=options.cache_dtype_str,
    )


def _indexer(layer: LayerKind, options: CacheOptions) -> KVCacheSpec:
    return MLAAttentionSpec(
        block_size=options.block_size,
        num_kv_heads=1,
        head_size=layer.facts["index_head_dim"] + INDEXER_SCALE_BYTES,
        dtype="uint8",
    )


def _mamba(model: ModelShape, layer: LayerKind, options: CacheOptions) -> KVCacheSpec:
    shapes = state_shapes(layer.kind, model.config, options.tensor_parallel_size)
    dtypes = (options.conv_dtype, options.ssm_dtype)
    return MambaSpec(
        block_size=options.block_size,
        shapes=shapes,
        dtypes=dtypes if len(shapes) == len(dtypes) else (options.ssm_dtype,),
        mamba_type=layer.kind,
        mamba_cache_mode=options.mamba_cache_mode,
        num_speculative_blocks=options.num_speculative_blocks,
    )


_Maker = Callable[[ModelShape, LayerKind, CacheOptions], KVCacheSpec]

_MAKERS: Final[Mapping[str, _Maker]] = {
    "full_attention": _full,
    "sliding_window": _window,
    "chunked_local": _chunk,
    "mla": _mla,
    "sparse_mla": _mla,
    **dict.fromkeys(MAMBA_KINDS, _mamba),
}
"""Kind -> how its spec is made; kinds that keep nothing are not here."""
