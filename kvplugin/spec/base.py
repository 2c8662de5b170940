"""What every spec answers: bytes of a page, blocks of a request, what it merges with.

A *page* is one block of one layer. A spec is a frozen value: layers with equal specs
may share a block table, so every field that changes what a block holds is a field
here. Names and formulas follow vLLM 0.19.1, `v1/kv_cache_interface.py`.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from kvplugin.errors import ConfigError, KVPluginError
from kvplugin.spec.dtypes import Dtype, dtype_bytes
from kvplugin.spec.limits import EngineLimits, check_positive


class NotMergeableError(KVPluginError):
    """These specs cannot stand for one another: their layers need separate groups."""


@dataclass(frozen=True)
class KVCacheSpec:
    """The KV cache of one layer.

    A kind of its own implements `real_page_size_bytes` and `max_blocks_per_request`;
    the rest has defaults that are safe: layers merge only if their specs are equal.
    """

    block_size: int
    """Tokens in a block."""

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ConfigError: naming the field.
        """
        check_positive(self, "block_size")

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes of a page that hold data."""
        raise NotImplementedError

    @property
    def page_size_bytes(self) -> int:
        """Bytes of a page, with its padding."""
        return self.real_page_size_bytes

    def max_blocks_per_request(self, limits: EngineLimits) -> int:
        """Most blocks that a request of `max_model_len` tokens holds at one time."""
        raise NotImplementedError

    @property
    def reserved_blocks(self) -> int:
        """Blocks that the manager of a group with this spec keeps from all requests,
        once for the pool."""
        return 0

    def min_blocks_per_request(self, limits: EngineLimits) -> int:
        """Blocks that a request of one token holds."""
        return min(1, self.max_blocks_per_request(limits))

    def max_memory_usage_bytes(self, limits: EngineLimits) -> int:
        """Bytes of `max_blocks_per_request` in this layer."""
        return self.max_blocks_per_request(limits) * self.page_size_bytes

    @property
    def uniform_type_key(self) -> Hashable:
        """Equal for specs whose layers always need the same token slots.

        Such layers may share a block table whatever their pages are
        (`UniformTypeKVCacheSpecs`), if their block sizes are equal too.
        """
        return self

    def copy_with_new_block_size(self, block_size: int) -> Self:
        """This spec with another block size; a padding stays what it is.

        Raises:
            ConfigError: the larger page does not fit the padded one.
        """
        return replace(self, block_size=block_size)

    @classmethod
    def merge(cls, specs: Sequence["KVCacheSpec"]) -> "KVCacheSpec":
        """One spec for layers that have these; at least one.

        Raises:
            NotMergeableError: there is none.
        """
        if any(spec != specs[0] for spec in specs[1:]):
            raise NotMergeableError(
                "All layers in the same KV cache group must be the same."
            )
        return specs[0]


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(KVCacheSpec):
    """Keys and values of a number of heads, for each token."""

    num_kv_heads: int
    head_size: int
    """Elements of a key (and of a value, unless `head_size_v` says otherwise)."""
    dtype: Dtype
    head_size_v: int | None = None
    """Elements of a value; None becomes `head_size`. As in 0.32 every attention kind
    has it; in 0.19 only full attention."""
    page_size_padded: int | None = None
    """Bytes to make of a page; None leaves it as large as its data."""

    def __post_init__(self) -> None:
        """Fill in `head_size_v` and refuse impossible values.

        Raises:
            ConfigError: naming the field.
        """
        super().__post_init__()
        if self.head_size_v is None:
            object.__setattr__(self, "head_size_v", self.head_size)
        check_positive(self, "num_kv_heads", "head_size")
        check_positive(self, "head_size_v", least=0)
        dtype_bytes(self.dtype)
        check_padding(self, self.page_size_padded)

    @property
    def value_size(self) -> int:
        """Elements of a value."""
        return self.head_size if self.head_size_v is None else self.head_size_v

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes of keys and values in a block."""
        head_bytes = (self.head_size + self.value_size) * dtype_bytes(self.dtype)
        return self.block_size * self.num_kv_heads * head_bytes

    @property
    def page_size_bytes(self) -> int:
        """Bytes of a page, with its padding."""
        return self.page_size_padded or self.real_page_size_bytes


def check_padding(spec: KVCacheSpec, padded: int | None) -> None:
    """Check that a padded page holds the data.

    Raises:
        ConfigError: it is smaller.
    """
    if padded is not None and padded < spec.real_page_size_bytes:
        raise ConfigError(
            f"{type(spec).__name__}.page_size_padded is {padded}, less than the "
            f"{spec.real_page_size_bytes} bytes of a page"
        )
