"""Protect what requests in the waiting queue are about to hit."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Final, cast

import msgspec

from kvplugin.errors import IntegrityError, check_ranges
from kvplugin.policies.eviction.base import EvictionPolicy
from kvplugin.policies.eviction.protecting import Protecting, Protection
from kvplugin.policies.eviction.ranked_set import Rank


class QueueInformedOptions(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """How much is protected."""

    max_protected_share: float = 0.5
    """Most blocks that only their protection keeps, as a share of the pool."""

    def __post_init__(self) -> None:
        check_ranges(self, {"max_protected_share": (0, 1)})


_DEFAULTS: Final = QueueInformedOptions()


class QueueInformed(Protecting):
    """Protects the blocks whose keys waiting requests want, those too whose key was
    wanted before the block existed.

    Over the budget those wanted last go first, as requests that began to wait earlier
    run earlier; of those wanted since the same step, the deepest ones. How many
    requests want a key only says how long it is wanted: a block that many want costs
    one computation, like any other, if it is evicted. Of a key that has several blocks
    all are protected.

    Args:
        inner: ranks the blocks.
        options: how much is protected.
    """

    needs_hits = False

    def __init__(
        self, inner: EvictionPolicy, options: QueueInformedOptions = _DEFAULTS
    ) -> None:
        super().__init__(inner, options.max_protected_share)
        self._wanted: dict[bytes, tuple[int, int]] = {}
        """Of wanted keys: by how many requests, and since which step."""
        self._step = 0
        self._key_of: dict[int, bytes] = {}
        """Of saved blocks."""
        self._saved_of: dict[bytes, set[int]] = {}
        """Saved blocks by key."""

    def step(
        self, now: float, soon: Iterable[bytes], dropped: Mapping[bytes, int]
    ) -> None:
        soon = tuple(soon)  # may be read only once
        super().step(now, soon, dropped)
        self._step += 1
        changed = self._want(soon) | self._want_no_longer(dropped)
        saved = [self._saved_of.get(key, ()) for key in changed]
        self._reconsider(block for blocks in saved for block in blocks)

    def check(self) -> None:
        super().check()
        of_key = sorted(block for blocks in self._saved_of.values() for block in blocks)
        if not of_key == sorted(self._key_of) == sorted((*self._saved, *self._due)):
            raise IntegrityError("queue: saved blocks and their keys disagree")

    def _protection(self, block: int) -> Protection | None:
        if not self._wanted:
            return None
        info = self._info(block)
        wanted = self._wanted.get(info.key)
        return wanted and (wanted[1], -info.depth)

    def _worth(self, what: Hashable) -> Rank:
        """Of all that is wanted since this step."""
        return (-cast("int", what),)

    def _save_now(self, block: int) -> None:
        key = self._key_of[block] = self._info(block).key
        self._saved_of.setdefault(key, set()).add(block)

    def _save_no_longer(self, ids: Sequence[int]) -> None:
        for block in ids:
            key = self._key_of.pop(block, None)
            if key is None:
                continue
            self._saved_of[key].discard(block)
            if not self._saved_of[key]:
                del self._saved_of[key]

    def _want(self, keys: Iterable[bytes]) -> set[bytes]:
        """Keys that are wanted from now on."""
        begun = set()
        for key in keys:
            count, since = self._wanted.get(key, (0, self._step))
            self._wanted[key] = count + 1, since
            if not count:
                begun.add(key)
        return begun

    def _want_no_longer(self, keys: Mapping[bytes, int]) -> set[bytes]:
        """Keys that nobody wants now. What nobody wanted is passed over."""
        ended = set()
        for key, by in keys.items():
            count, since = self._wanted.pop(key, (0, 0))
            if count > by:
                self._wanted[key] = count - by, since
            else:
                ended.add(key)
        return ended
