"""How large a group's block table must be, and what its blocks are."""

from dataclasses import dataclass

from kvplugin.errors import ConfigError
from kvplugin.spec import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    EngineLimits,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    cdiv,
    check_positive,
)

_NOT_OF_TOKENS = (MambaSpec, CrossAttentionSpec, EncoderOnlyAttentionSpec)
"""Kinds whose blocks hold a state, an encoder's tokens, or nothing: the tokens of a
step have no slots there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TableShape:
    """The block table of one group.

    Raises:
        ConfigError: a size below 1, or kernel blocks that do not divide a block.
    """

    block_size: int
    """Tokens of a block of the manager on one rank."""
    width: int
    """Blocks of the manager in the longest row."""
    kernel_block_size: int
    """Tokens of a block as kernels count them; divides `block_size`."""
    takes_tokens: bool = True
    """Whether the tokens of a step have slots in it."""
    is_sharded: bool = False
    """Whether context-parallel ranks share its tokens; else each keeps them all."""
    ranks: int = 1
    """Context-parallel ranks that `width` reckons with, where they share its tokens."""
    sliding_window: int = 0
    """Tokens that a query sees, itself included; 0 for all."""
    attention_chunk_size: int = 0
    """Tokens of a chunk, where a query sees its own chunk only; 0 for all."""

    def __post_init__(self) -> None:
        check_positive(self, "block_size", "width", "kernel_block_size", "ranks")
        check_positive(self, "sliding_window", "attention_chunk_size", least=0)
        if self.block_size % self.kernel_block_size:
            raise ConfigError(
                f"kernel block size {self.kernel_block_size} does not divide "
                f"block_size {self.block_size}"
            )

    @property
    def ratio(self) -> int:
        """Kernel blocks in a block."""
        return self.block_size // self.kernel_block_size

    @property
    def columns(self) -> int:
        """Kernel blocks in the longest row."""
        return self.width * self.ratio

    def num_skipped_blocks(self, num_computed: int) -> int:
        """Leading blocks of the manager that no query from position `num_computed` on
        sees; as `get_num_skipped_tokens` of the managers."""
        tokens = 0
        if self.sliding_window:
            tokens = max(num_computed - self.sliding_window + 1, 0)
        elif self.attention_chunk_size:
            tokens = num_computed // self.attention_chunk_size
            tokens *= self.attention_chunk_size
        return tokens // self.block_size


def table_shape(
    spec: KVCacheSpec, limits: EngineLimits, kernel_block_size: int | None = None
) -> TableShape:
    """The shape of a group's block table.

    Args:
        spec: of the group.
        limits: how long requests may be.
        kernel_block_size: see `select_kernel_block_size`; None for the spec's own.

    Raises:
        ConfigError: the kernel block size does not divide the block size.
    """
    if isinstance(spec, UniformTypeKVCacheSpecs):
        spec = next(iter(spec.kv_cache_specs.values()))
    is_sharded = isinstance(spec, FullAttentionSpec)
    window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else 0
    chunk = (
        spec.attention_chunk_size if isinstance(spec, ChunkedLocalAttentionSpec) else 0
    )
    return TableShape(
        block_size=spec.block_size,
        # A group that keeps nothing has a table of null blocks.
        width=max(_width(spec, limits), 1),
        kernel_block_size=kernel_block_size or spec.block_size,
        takes_tokens=not isinstance(spec, _NOT_OF_TOKENS),
        is_sharded=is_sharded,
        ranks=limits.context_parallel_size if is_sharded else 1,
        sliding_window=window,
        attention_chunk_size=chunk,
    )


def _width(spec: KVCacheSpec, limits: EngineLimits) -> int:
    """Entries of a row, null blocks included: rows keep the places of freed blocks."""
    size = spec.block_size
    if isinstance(spec, MambaSpec):
        return cdiv(limits.max_model_len, size) + spec.num_speculative_blocks
    if isinstance(spec, CrossAttentionSpec):
        return cdiv(limits.max_num_encoder_input_tokens, size)
    if isinstance(spec, EncoderOnlyAttentionSpec):
        return 0
    if isinstance(spec, FullAttentionSpec):
        size *= limits.context_parallel_size
    return cdiv(limits.max_model_len, size)
