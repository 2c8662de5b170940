"""Admission: how much room is left to those that run."""

import msgspec

from kvplugin.errors import check_ranges
from kvplugin.hooks import AdmissionContext, hookimpl


class FreeShareOptions(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """Options of `FreeShare`."""

    share: float = 0.05
    """Of the pool's blocks that must be free, 0 to 1; evictable ones are."""

    def __post_init__(self) -> None:
        check_ranges(self, {"share": (0, 1)})


class FreeShare:
    """Admits while at least a share of the blocks is free, so that those that run can
    grow: fewer run at a time, and fewer lose what they have computed. Where nobody
    runs it is not asked."""

    def __init__(self, options: FreeShareOptions) -> None:
        self._share = options.share

    @hookimpl
    def kvp_choose_admission(self, ctx: AdmissionContext) -> bool:
        """The answer, before the request takes its own blocks."""
        return ctx.free_blocks >= self._share * ctx.num_blocks
