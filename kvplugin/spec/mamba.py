"""Recurrent state in place of keys and values (vLLM 0.19.1's `MambaSpec`)."""

import math
from collections.abc import Hashable
from dataclasses import dataclass

from kvplugin.errors import ConfigError
from kvplugin.spec.base import KVCacheSpec, check_padding
from kvplugin.spec.dtypes import Dtype, dtype_bytes
from kvplugin.spec.limits import (
    EngineLimits,
    cdiv,
    check_mamba_cache_mode,
    check_positive,
)


@dataclass(frozen=True)
class MambaSpec(KVCacheSpec):
    """States of a recurrent layer: Mamba, linear attention, short convolutions.

    A page holds one state, whatever the block size: `block_size` is the distance in
    tokens at which states may be kept.
    """

    shapes: tuple[tuple[int, ...], ...]
    """Shape of each tensor of a state, e.g. convolution and temporal state."""
    dtypes: tuple[Dtype, ...]
    """One for each of `shapes`."""
    page_size_padded: int | None = None
    """Bytes to make of a page, usually those of an attention page."""
    mamba_type: str = "mamba2"
    """Names the state's kind for the worker."""
    mamba_cache_mode: str = "none"
    """One of `MAMBA_CACHE_MODES`."""
    num_speculative_blocks: int = 0
    """States for draft tokens, to roll back to."""

    def __post_init__(self) -> None:
        """Refuse impossible values; lists become tuples.

        Raises:
            ConfigError: naming the field.
        """
        super().__post_init__()
        object.__setattr__(self, "shapes", tuple(map(tuple, self.shapes)))
        object.__setattr__(self, "dtypes", tuple(self.dtypes))
        sizes = [size for shape in self.shapes for size in shape]
        if not sizes or min(sizes) < 1:
            raise ConfigError(
                f"MambaSpec.shapes must be shapes of at least 1, not {self.shapes}"
            )
        if len(self.dtypes) != len(self.shapes):
            raise ConfigError(
                f"MambaSpec.dtypes has {len(self.dtypes)} entries for "
                f"{len(self.shapes)} shapes"
            )
        check_positive(self, "num_speculative_blocks", least=0)
        check_mamba_cache_mode(self, self.mamba_cache_mode)
        check_padding(self, self.page_size_padded)

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes of a state."""
        return sum(
            math.prod(shape) * dtype_bytes(dtype)
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )

    @property
    def page_size_bytes(self) -> int:
        """Bytes of a page, with its padding."""
        return self.page_size_padded or self.real_page_size_bytes

    def max_blocks_per_request(self, limits: EngineLimits) -> int:
        """States of a request at its fullest, and those for drafts.

        Computed tokens may be rejected drafts: what is surely settled ends that many
        tokens before, and the state there is still read. Mode `all` has it and one
        for each block that the tokens after it touch. Mode `align` has it and one
        for each step after it, but no more than there are blocks (of the states that
        drafts left, one a block). Mode `none` has the last one.

        0.19 counts every block of the request in mode `all`, without drafts, and two
        states in mode `align`.
        """
        mode = limits.mamba_cache_mode or self.mamba_cache_mode
        size, drafts = self.block_size, self.num_speculative_blocks
        length = limits.max_model_len
        if mode == "none":
            return 1 + drafts
        if limits.vllm019_arithmetic:
            return cdiv(length, size) if mode == "all" else 2 + drafts
        if mode == "all":
            states = cdiv(drafts + limits.max_in_flight_tokens, size) + 1
        else:
            # A decode step computes one token and drafts; prefills, which end their
            # steps at block boundaries, never leave more.
            step = min(1 + drafts, limits.max_num_batched_tokens)
            states = cdiv(drafts + step, size) + limits.max_concurrent_batches
        return min(states, cdiv(length, size)) + drafts

    def min_blocks_per_request(self, limits: EngineLimits) -> int:
        """The last state and those for drafts."""
        most = self.max_blocks_per_request(limits)
        return min(most, 1 + self.num_speculative_blocks)

    @property
    def uniform_type_key(self) -> Hashable:
        """Equally many states for drafts, kept alike, are equally many blocks."""
        return ("mamba", self.mamba_cache_mode, self.num_speculative_blocks)
