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
        """States of a request: one a block, or the last one (in mode `align` with
        the one that it is computed from) and those for drafts."""
        mode = limits.mamba_cache_mode or self.mamba_cache_mode
        if mode == "all":
            return cdiv(limits.max_model_len, self.block_size)
        return (2 if mode == "align" else 1) + self.num_speculative_blocks

    def min_blocks_per_request(self, limits: EngineLimits) -> int:
        """The last state and those for drafts."""
        most = self.max_blocks_per_request(limits)
        return min(most, 1 + self.num_speculative_blocks)

    @property
    def uniform_type_key(self) -> Hashable:
        """Equally many states for drafts are equally many blocks."""
        return ("mamba", self.num_speculative_blocks)
