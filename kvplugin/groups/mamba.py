"""Block sizes at which an attention page holds a Mamba state.

After vLLM 0.19.1 `model_executor/models/config.py`, HybridAttentionMambaModelConfig.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from kvplugin.errors import ConfigError
from kvplugin.spec import (
    AttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    cdiv,
    check_mamba_cache_mode,
    check_positive,
)

KERNEL_ALIGNMENT: Final = {"default": 16, "mla": 64, "cutlass_mla": 128}
"""Tokens of which an attention kernel's block must be a multiple."""


@dataclass(frozen=True, kw_only=True)
class MambaAlignment:
    """Sizes at which pages of attention and of Mamba agree."""

    block_size: int
    """Tokens of an attention block; never less than asked for."""
    mamba_block_size: int
    mamba_page_size_padded: int | None
    """None where the two agree without padding."""
    padding_bytes: int
    """Bytes of a Mamba page without data."""


@dataclass(frozen=True, kw_only=True)
class MambaPages:
    """What the alignment starts from."""

    attention_token_bytes: int
    """Bytes of one token in an attention layer."""
    state_bytes: int
    """Bytes of a Mamba state."""
    block_size: int
    """Tokens of an attention block, as configured."""
    kernel_alignment: int = KERNEL_ALIGNMENT["default"]
    mamba_cache_mode: str = "none"
    mamba_block_size: int | None = None
    """As configured; in mode `all` the chunk of the kernel (`mamba_chunk_size`)."""
    max_model_len: int

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ConfigError: naming the field.
        """
        check_positive(
            self,
            "attention_token_bytes",
            "state_bytes",
            "block_size",
            "kernel_alignment",
            "max_model_len",
        )
        if self.mamba_block_size is not None:
            check_positive(self, "mamba_block_size")
        check_mamba_cache_mode(self, self.mamba_cache_mode)


def align_mamba_page(pages: MambaPages) -> MambaAlignment:
    """The smallest attention block whose page holds a state, and what follows from it.

    Mode `all` keeps a state a block, so blocks are whole chunks of the kernel too;
    `align` keeps states at attention blocks; `none` keeps the last state only, so its
    block is the whole request (or as configured).

    Raises:
        ConfigError: mode `all` without `mamba_block_size`.
    """
    unit, mamba_block = pages.kernel_alignment, pages.mamba_block_size
    if pages.mamba_cache_mode == "all":
        if mamba_block is None:
            raise ConfigError(
                "mamba_block_size must be given in mode 'all': the kernel's chunk size"
            )
        unit = math.lcm(unit, mamba_block)
    least = unit * cdiv(pages.state_bytes, unit * pages.attention_token_bytes)
    block_size = max(pages.block_size, least)
    if pages.mamba_cache_mode == "all":
        mamba_block = least
    elif pages.mamba_cache_mode == "align":
        mamba_block = block_size
    page = block_size * pages.attention_token_bytes
    padding = page - pages.state_bytes
    return MambaAlignment(
        block_size=block_size,
        mamba_block_size=mamba_block or pages.max_model_len,
        mamba_page_size_padded=page if padding else None,
        padding_bytes=padding,
    )


def align_mamba_specs(
    specs: Mapping[str, KVCacheSpec],
    *,
    max_model_len: int,
    kernel_alignment: int | None = None,
    mamba_chunk_size: int | None = None,
) -> dict[str, KVCacheSpec]:
    """The specs with attention blocks that hold a state, and Mamba pages padded.

    Layers of one size of each kind, as vLLM assumes; without both kinds, unchanged.

    Args:
        specs: layer name -> spec.
        max_model_len: block size of Mamba layers in mode `none`.
        kernel_alignment: tokens; None takes that of the attention kind.
        mamba_chunk_size: tokens; needed in mode `all`.

    Raises:
        ConfigError: attention or Mamba layers of several sizes.
    """
    attention = [spec for spec in specs.values() if isinstance(spec, AttentionSpec)]
    mamba = [spec for spec in specs.values() if isinstance(spec, MambaSpec)]
    if not attention or not mamba:
        return dict(specs)
    tokens = {spec.copy_with_new_block_size(1).page_size_bytes for spec in attention}
    states = {(spec.real_page_size_bytes, spec.mamba_cache_mode) for spec in mamba}
    sizes = {spec.block_size for spec in attention}
    if max(len(tokens), len(states), len(sizes)) > 1:
        raise ConfigError(
            "attention and Mamba pages cannot be aligned: layers of one kind have "
            f"several sizes (bytes a token {sorted(tokens)}, block sizes "
            f"{sorted(sizes)}, states {sorted(states)})"
        )
    (state_bytes, mode), kind = states.pop(), "default"
    if isinstance(attention[0], MLAAttentionSpec):
        kind = "mla"
    aligned = align_mamba_page(
        MambaPages(
            attention_token_bytes=tokens.pop(),
            state_bytes=state_bytes,
            block_size=sizes.pop(),
            kernel_alignment=kernel_alignment or KERNEL_ALIGNMENT[kind],
            mamba_cache_mode=mode,
            mamba_block_size=mamba_chunk_size if mode == "all" else None,
            max_model_len=max_model_len,
        )
    )
    return {name: _aligned(spec, aligned) for name, spec in specs.items()}


def _aligned(spec: KVCacheSpec, aligned: MambaAlignment) -> KVCacheSpec:
    if isinstance(spec, MambaSpec):
        return replace(
            spec,
            block_size=aligned.mamba_block_size,
            page_size_padded=aligned.mamba_page_size_padded,
        )
    return spec.copy_with_new_block_size(aligned.block_size)
