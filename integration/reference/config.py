"""Settings of a model and of the engine that runs it. Unknown keys are refused."""

from typing import Any, Final, Literal

import msgspec
import torch
from msgspec import structs

from kvplugin.errors import ConfigError, check_ranges
from kvplugin.scheduler import SchedulerConfig

Kind = Literal[
    "full",
    "sliding_window",
    "chunked_local",
    "sink",
    "mla",
    "mla_fp8",
    "cross",
    "encoder_only",
    "recurrent",
]


class LayerConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """What one layer does with the tokens before it."""

    kind: Kind = "full"
    window: int = 0
    """Tokens that a query of `sliding_window` sees, itself among them."""
    chunk: int = 0
    """Tokens of a chunk of `chunked_local`: a query sees its own chunk only."""
    sink_len: int = 0
    """Learned tokens that every query of `sink` sees; whole blocks."""
    head_size_v: int | None = None
    """Elements of a value; None for those of a key."""
    shares: int | None = None
    """Number of the earlier layer whose KV cache it uses in place of one of its own."""

    def __post_init__(self) -> None:
        """Refuse what the kind does not have, or lacks.

        Raises:
            ConfigError: naming the field.
        """
        check_ranges(self, {"head_size_v": (1, 2**16), **dict.fromkeys(_SIZES, _SIZE)})
        for name, kind in _SIZES.items():
            if (getattr(self, name) > 0) != (self.kind == kind):
                raise ConfigError(
                    f"LayerConfig.{name}={getattr(self, name)}: a layer of kind {kind} "
                    f"needs it, no other has it; this one is {self.kind}"
                )
        if self.shares is not None and self.kind in _SHARES_NOTHING:
            raise ConfigError(
                f"LayerConfig.shares: a layer of kind {self.kind} shares no cache"
            )


_SIZES: Final = {
    "window": "sliding_window",
    "chunk": "chunked_local",
    "sink_len": "sink",
}
_SIZE: Final = (0, 2**24)
_SHARES_NOTHING: Final = ("recurrent", "encoder_only", "cross", "mla", "mla_fp8")


class ModelConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """A decoder in the manner of Llama: RMSNorm, RoPE, grouped queries, SwiGLU."""

    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    """Elements of a key; of MLA's queries the part without position."""
    intermediate_size: int
    layers: tuple[LayerConfig, ...]
    rope_theta: float = 10_000.0
    rms_eps: float = 1e-5
    tie_embeddings: bool = True
    kv_lora_rank: int = 0
    """Elements of MLA's latent; 512 for `mla_fp8`."""
    rope_dim: int = 0
    """Elements of MLA's rotary part; 64 for `mla_fp8`."""
    conv_kernel: int = 4
    """Tokens that the short convolution of recurrent layers mixes."""
    dtype: str = "float64"

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the key.

        Raises:
            ConfigError: a value is out of its range, or does not go with another.
        """
        check_ranges(self, _MODEL_RANGES)
        if self.num_heads % self.num_kv_heads or self.head_size % 2:
            raise ConfigError(
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads="
                f"{self.num_kv_heads}, and head_size={self.head_size} be even"
            )
        if all(layer.kind == "encoder_only" for layer in self.layers):
            raise ConfigError("layers must have one at least that keeps a KV cache")
        for number, layer in enumerate(self.layers):
            if layer.shares is not None:
                self._check_target(number, layer.shares)

    def _check_target(self, number: int, target: int) -> None:
        layer = self.layers[number]
        owner = self.layers[target] if 0 <= target < number else None
        if (
            owner is None
            or owner.shares is not None
            or owner.kind in _SHARES_NOTHING
            or structs.replace(layer, shares=None) != owner
        ):
            raise ConfigError(
                f"layers[{number}].shares={target} must be the number of an earlier "
                "layer of keys and values of the same kind, sizes and sight, with a "
                "cache of its own"
            )

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch has it."""
        return torch_dtype(self.dtype, "ModelConfig.dtype")


_MODEL_RANGES: Final = dict.fromkeys(
    (
        "vocab_size",
        "hidden_size",
        "num_heads",
        "num_kv_heads",
        "head_size",
        "intermediate_size",
    ),
    (1, 2**24),
) | {"conv_kernel": (2, 64), "kv_lora_rank": (0, 2**16), "rope_dim": (0, 2**12)}


class EngineConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """How a model is served. Names are vLLM's where it has the setting."""

    block_size: int = 16
    """Tokens of an attention block; more where a page has to hold a state."""
    num_blocks: int = 128
    """Blocks of the pool, the null block included."""
    max_model_len: int = 256
    layout: str | None = None
    """NHD, HND or a name of `kvplugin.worker.backends.LAYOUTS`; None for what the
    connector wishes, and NHD without a wish."""
    backend: str = "REFERENCE"
    """Of `worker.backend_table` or `backends.py`, for keys and values."""
    mla_backend: str = "REFERENCE_MLA"
    """The same for the latents of `mla`."""
    mla_fp8_backend: str = "REFERENCE_RECORDS"
    """The same for the records of `mla_fp8`."""
    kernel_block_size: int | None = None
    """Tokens of a block as attention counts; None for those of the manager."""
    kv_cache_dtype: str = "auto"
    """Of keys, values and latents; ``auto`` for the model's."""
    tensor_parallel_size: int = 1
    scheduler: SchedulerConfig = SchedulerConfig()
    enable_prefix_caching: bool = True
    disable_hybrid_kv_cache_manager: bool = False
    """Manage windows and chunks as full attention, in one group."""
    mamba_cache_mode: Literal["none", "align", "all"] = "align"
    mamba_chunk_size: int | None = None
    """Tokens between the states of mode ``all``; None for `block_size`."""
    max_num_encoder_input_tokens: int = 0
    """Encoder tokens of a request, for cross-attention."""
    num_drafts: int = 0
    """Tokens that a drafter proposes after each sample."""
    eviction_policy: str = ""
    """Ranks cached blocks; see docs/policies.md. LRU if empty."""
    eviction_policy_options: dict[str, Any] = {}
    """What the policy is told."""
    seed: int = 0
    """Of requests that bring no seed of their own."""
    engine_id: str = "reference"
    """Names this engine to connectors, among others."""
    model_name: str = "reference"
    """What connectors call the model's weights; other weights need another name."""
    device: str = "cpu"
    record_logits: bool = False
    """Keep the logits of each sampled token, for tests."""

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the key.

        Raises:
            ConfigError: a value is out of its range.
        """
        check_ranges(self, _ENGINE_RANGES)
        if self.kv_cache_dtype != "auto":
            dtype = torch_dtype(self.kv_cache_dtype, "kv_cache_dtype")
            if not dtype.is_floating_point:
                raise ConfigError(
                    f"kv_cache_dtype={self.kv_cache_dtype!r} must be auto or a float "
                    "type: this engine has no scales for integers"
                )


_ENGINE_RANGES: Final = {
    "block_size": (1, 2**16),
    "num_blocks": (2, 2**31),
    "max_model_len": (1, 2**24),
    "kernel_block_size": (1, 2**16),
    "tensor_parallel_size": (1, 64),
    "mamba_chunk_size": (1, 2**16),
    "max_num_encoder_input_tokens": (0, 2**20),
    "num_drafts": (0, 64),
    "seed": (0, 2**31),
}


class SamplingParams(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """What a user asks of a request."""

    max_tokens: int = 16
    temperature: float = 0.0
    """0 takes the likeliest token."""
    seed: int | None = None
    """Of the request: equal seeds give equal tokens, whatever runs beside it."""
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the key.

        Raises:
            ConfigError: a value is out of its range.
        """
        check_ranges(self, _SAMPLING_RANGES)


_SAMPLING_RANGES: Final = {
    "max_tokens": (1, 2**24),
    "temperature": (0, 1e6),
    "seed": (0, 2**31),
}


def torch_dtype(name: str, key: str) -> torch.dtype:
    """A dtype by name.

    Raises:
        ConfigError: torch has none of this name; `key` is where it stands.
    """
    dtype: Any = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"{key}: torch has no dtype {name!r}")
    return dtype
