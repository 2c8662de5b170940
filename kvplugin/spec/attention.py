"""The attention kinds, after vLLM 0.19.1 `v1/kv_cache_interface.py`."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Final

from kvplugin.errors import ConfigError
from kvplugin.spec.base import AttentionSpec, KVCacheSpec, NotMergeableError
from kvplugin.spec.dtypes import dtype_bytes
from kvplugin.spec.limits import EngineLimits, cdiv, check_positive

FP8_DS_MLA: Final = "fp8_ds_mla"
FP8_DS_MLA_BYTES: Final = 656
"""A token of DeepSeek's sparse MLA in fp8: 512 of the latent, 4 scales of 4 bytes, 64
rotary elements of 2 (vLLM 0.19.1 `v1/attention/backends/mla/flashmla_sparse.py`)."""


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec(AttentionSpec):
    """Every token is kept.

    Where windows are managed as full attention (hybrid manager off), the layer still
    computes with its window: it is recorded here, and changes no bytes.
    """

    sliding_window: int | None = None
    """Tokens of the window that the layer computes with, if any."""
    attention_chunk_size: int | None = None
    """Tokens of the chunk that the layer computes with, if any."""

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ConfigError: naming the field.
        """
        super().__post_init__()
        for name in ("sliding_window", "attention_chunk_size"):
            if getattr(self, name) is not None:
                check_positive(self, name)

    def max_blocks_per_request(self, limits: EngineLimits) -> int:
        """Blocks of the longest request; context-parallel ranks share its tokens."""
        tokens = cdiv(limits.max_model_len, limits.context_parallel_size)
        return cdiv(tokens, self.block_size)

    @property
    def uniform_type_key(self) -> Hashable:
        """Full attention of any shape, MLA included, keeps the same tokens."""
        return "full"

    @classmethod
    def merge(cls, specs: Sequence[KVCacheSpec]) -> KVCacheSpec:
        """One spec for full layers; it carries the one window or chunk among them.

        Raises:
            NotMergeableError: another kind, another shape, or two windows.
        """
        full = [spec for spec in specs if type(spec) is cls]
        if len(full) != len(specs):
            raise NotMergeableError(
                "All attention layers in the same KV cache group must be "
                f"{cls.__name__}."
            )
        window = _the_one({spec.sliding_window for spec in full})
        chunk = _the_one({spec.attention_chunk_size for spec in full})
        merged = replace(full[0], sliding_window=window, attention_chunk_size=chunk)
        for spec in full:
            if _shape(spec) != _shape(merged):
                raise NotMergeableError(
                    "All attention layers in the same KV cache group must have the "
                    "same attention spec."
                )
        if window is not None and chunk is not None:
            raise NotMergeableError(
                "Model with both sliding window layers and chunked local attention "
                "layers is not supported."
            )
        return merged


@dataclass(frozen=True, kw_only=True)
class MLAAttentionSpec(FullAttentionSpec):
    """One latent vector a token and no value: multi-head latent attention."""

    cache_dtype_str: str | None = None
    """The engine's name of the cache format; ``fp8_ds_mla`` has its own size."""

    def __post_init__(self) -> None:
        """Reset `head_size_v` (0.32 writes 0) and refuse impossible values.

        Raises:
            ConfigError: naming the field.
        """
        if self.head_size_v == 0:
            object.__setattr__(self, "head_size_v", None)
        super().__post_init__()
        if self.head_size_v != self.head_size:
            raise ConfigError(
                "MLAAttentionSpec.head_size_v must be left out: the latent is stored "
                "once"
            )

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes of the latents in a block."""
        if self.cache_dtype_str == FP8_DS_MLA:
            return self.block_size * FP8_DS_MLA_BYTES
        token_bytes = self.num_kv_heads * self.head_size * dtype_bytes(self.dtype)
        return self.block_size * token_bytes

    @classmethod
    def merge(cls, specs: Sequence[KVCacheSpec]) -> KVCacheSpec:
        """One spec for MLA layers.

        Raises:
            NotMergeableError: another kind, another shape, or two cache formats.
        """
        formats = {getattr(spec, "cache_dtype_str", None) for spec in specs}
        if len(formats) > 1 and all(type(spec) is cls for spec in specs):
            raise NotMergeableError(
                "All attention layers in the same KV cache group must use the same "
                "quantization method."
            )
        return super().merge(specs)


@dataclass(frozen=True, kw_only=True)
class SinkFullAttentionSpec(FullAttentionSpec):
    """Full attention whose first tokens are the same for all requests."""

    sink_len: int = 0
    """Tokens of the sink: whole blocks, shared by every request. None, which vLLM
    allows, becomes 0."""

    def __post_init__(self) -> None:
        """Fill in `sink_len` and refuse impossible values.

        Raises:
            ConfigError: naming the field.
        """
        super().__post_init__()
        object.__setattr__(self, "sink_len", self.sink_len or 0)
        check_positive(self, "sink_len", least=0)
        if self.sink_len % self.block_size:
            raise ConfigError(
                f"SinkFullAttentionSpec.sink_len {self.sink_len} must be a multiple "
                f"of block_size {self.block_size}"
            )

    @property
    def reserved_blocks(self) -> int:
        """Those of the sink."""
        return self.sink_len // self.block_size

    @property
    def uniform_type_key(self) -> Hashable:
        """A sink shifts the block table, so layers without it need another one."""
        return ("full", self.sink_len)

    @classmethod
    def merge(cls, specs: Sequence[KVCacheSpec]) -> KVCacheSpec:
        """One spec for layers with the same sink.

        Raises:
            NotMergeableError: another kind, another shape, or two sinks.
        """
        if len({getattr(spec, "sink_len", None) for spec in specs}) > 1:
            raise NotMergeableError(
                "All attention layers in the same KV cache group must have the same "
                "sink."
            )
        return super().merge(specs)


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    """The last `sliding_window` tokens are kept."""

    sliding_window: int

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ConfigError: naming the field.
        """
        super().__post_init__()
        check_positive(self, "sliding_window")

    def max_blocks_per_request(self, limits: EngineLimits) -> int:
        """Blocks that a window and the tokens in flight touch, however they lie.

        n tokens touch at most ``(n - 2) // block_size + 2`` blocks, and never more
        than the request has. 0.19 counts ``cdiv(n, block_size) + 1``.

        Raises:
            ConfigError: decode context parallelism, which windows do not support.
        """
        if limits.decode_context_parallel_size != 1:
            raise ConfigError(
                "DCP not support sliding window. Set decode_context_parallel_size to 1."
            )
        size = self.block_size
        span = self.sliding_window - 1 + limits.max_in_flight_tokens
        span = min(span, limits.max_model_len)
        if limits.vllm019_arithmetic:
            return cdiv(span, size) + 1
        touched = (span - 2) // size + 2
        return min(touched, cdiv(limits.max_model_len, size))

    @property
    def uniform_type_key(self) -> Hashable:
        """Equal windows keep the same tokens."""
        return ("sliding_window", self.sliding_window)


@dataclass(frozen=True, kw_only=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """The tokens of the current chunk are kept."""

    attention_chunk_size: int

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ConfigError: naming the field.
        """
        super().__post_init__()
        check_positive(self, "attention_chunk_size")

    def max_blocks_per_request(self, limits: EngineLimits) -> int:
        """Blocks that the fullest chunk and the tokens in flight touch.

        The worst moment of chunk k is when all but its last token are computed. Where
        chunks start inside a block the k-th start decides; the starts repeat after
        ``block_size / gcd`` chunks. 0.19 counts ``cdiv(chunk + batch, block_size)``,
        which may be one too many, or too few where chunks are not whole blocks.
        """
        size, chunk = self.block_size, self.attention_chunk_size
        in_flight, length = limits.max_in_flight_tokens, limits.max_model_len
        if limits.vllm019_arithmetic:
            return cdiv(min(chunk + in_flight, length), size)
        starts = min(size // math.gcd(size, chunk), cdiv(length, chunk))
        return max(
            cdiv(min((k + 1) * chunk - 1 + in_flight, length), size) - k * chunk // size
            for k in range(starts)
        )

    @property
    def uniform_type_key(self) -> Hashable:
        """Equal chunks keep the same tokens."""
        return ("chunked_local", self.attention_chunk_size)


@dataclass(frozen=True, kw_only=True)
class EncoderOnlyAttentionSpec(AttentionSpec):
    """Attention that keeps nothing."""

    def max_blocks_per_request(self, limits: EngineLimits) -> int:
        """None."""
        return 0

    @property
    def uniform_type_key(self) -> Hashable:
        """All of them keep nothing."""
        return "encoder_only"


@dataclass(frozen=True, kw_only=True)
class CrossAttentionSpec(AttentionSpec):
    """The encoder's tokens are kept."""

    def max_blocks_per_request(self, limits: EngineLimits) -> int:
        """Blocks of the longest encoder input."""
        return cdiv(limits.max_num_encoder_input_tokens, self.block_size)

    def min_blocks_per_request(self, limits: EngineLimits) -> int:
        """All of them: encoder models pad their input (1,500 tokens for Whisper)."""
        return self.max_blocks_per_request(limits)

    @property
    def uniform_type_key(self) -> Hashable:
        """All of them keep the same encoder tokens."""
        return "cross"


def _the_one(sizes: set[int | None]) -> int | None:
    """The only size there is besides None, or None.

    Raises:
        NotMergeableError: there are two.
    """
    known = {size for size in sizes if size is not None}
    if len(known) > 1:
        raise NotMergeableError(
            "All attention layers in the same KV cache group must have the same "
            "window size."
        )
    return known.pop() if known else None


def _shape(spec: AttentionSpec) -> tuple[object, ...]:
    return tuple(getattr(spec, field.name) for field in fields(AttentionSpec))
