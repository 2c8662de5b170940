"""Blocks of long prefixes only."""

from collections.abc import Sequence

import msgspec

from kvplugin.errors import check_ranges
from kvplugin.policies.offload.base import OffloadContext


class MinDepthOptions(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """Options of `MinDepth`."""

    min_tokens: int = 1024
    """Tokens below which a prefix is computed again rather than kept."""

    def __post_init__(self) -> None:
        check_ranges(self, {"min_tokens": (1, 2**40)})


class MinDepth:
    """Stores all of a prefix or nothing: a short one is cheap to compute again, and the
    head of a long one is needed to load its tail."""

    def __init__(self, options: MinDepthOptions) -> None:
        self._min_tokens = options.min_tokens

    def admit(self, keys: Sequence[bytes], ctx: OffloadContext) -> Sequence[bool]:
        return [ctx.prefix_tokens >= self._min_tokens] * len(keys)
