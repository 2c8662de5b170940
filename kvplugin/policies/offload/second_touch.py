"""Blocks that two requests have computed, or more."""

from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from kvplugin.errors import check_ranges
from kvplugin.policies.offload.base import OffloadContext


class SecondTouchOptions(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """Options of `SecondTouch`."""

    memory: int = 65_536
    """Keys that are remembered, those seen last, and of one prompt its first ones;
    about 200 bytes each."""

    def __post_init__(self) -> None:
        check_ranges(self, {"memory": (1, 2**30)})


class SecondTouch:
    """Stores a block when a second request comes with it: what is seen once is mostly
    never seen again. The history of LRU-2 (O'Neil et al., "The LRU-K page replacement
    algorithm", 1993) as a filter. A request that comes back after a preemption is no
    second one."""

    def __init__(self, options: SecondTouchOptions) -> None:
        self._memory = options.memory
        self._seen: OrderedDict[bytes, str | None] = OrderedDict()
        """By whom a key was seen; None: by two."""

    def admit(self, keys: Sequence[bytes], ctx: OffloadContext) -> Sequence[bool]:
        # The tail first: a block is of no use without those before it, so what comes
        # last is what should be forgotten first.
        mask = [self._touch(key, ctx.request_id) for key in reversed(keys)]
        while len(self._seen) > self._memory:
            self._seen.popitem(last=False)
        return mask[::-1]

    def _touch(self, key: bytes, request_id: str) -> bool:
        before = self._seen.get(key, request_id)
        self._seen[key] = before if before == request_id else None
        self._seen.move_to_end(key)
        return before != request_id
