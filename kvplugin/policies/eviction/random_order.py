"""Random replacement: the yardstick that knows nothing."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from random import Random
from typing import Final

import msgspec

from kvplugin.errors import IntegrityError, check_ranges
from kvplugin.policies.eviction.base import BlockContext, BlockInfo

_NOWHERE: Final = -1


class RandomOrderOptions(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """Settings of `random`."""

    seed: int = 0
    """The same calls with the same seed evict the same blocks."""

    def __post_init__(self) -> None:
        check_ranges(self, {})


_DEFAULTS: Final = RandomOrderOptions()


class RandomOrder:
    """Any evictable block is as likely as any other to be the next victim. O(1) each.

    The evictable blocks stand in a shuffled list: one that comes in changes places with
    a random one (Durstenfeld's shuffle, CACM 1964), and one that goes leaves its place
    to the last. So the next victims are settled before anybody asks, and `order` can
    name them.
    """

    needs_info = False
    needs_hits = False
    needs_steps = False

    def __init__(self, options: RandomOrderOptions = _DEFAULTS) -> None:
        self._random = Random(options.seed)  # noqa: S311  # no secret
        self._blocks: list[int] = []
        """Next victim last."""
        self._places: list[int] = []
        """Index of each block in `_blocks`, or `_NOWHERE`."""

    def bind(self, num_blocks: int, info: Callable[[int], BlockInfo]) -> None:
        del info
        self._places = [_NOWHERE] * num_blocks

    def insert(self, ids: Sequence[int], ctx: BlockContext) -> None:
        del ids, ctx

    def hit(self, ids: Sequence[int], ctx: BlockContext) -> None:
        del ids, ctx

    def pin(self, ids: Sequence[int]) -> None:
        blocks, places = self._blocks, self._places
        for block in ids:
            place, places[block] = places[block], _NOWHERE
            last = blocks.pop()
            if last != block:
                blocks[place] = last
                places[last] = place

    def release(self, ids: Sequence[int]) -> None:
        blocks, places, random = self._blocks, self._places, self._random.random
        for block in ids:
            blocks.append(block)
            place = int(random() * len(blocks))
            moved = blocks[place]
            blocks[-1], places[moved] = moved, len(blocks) - 1
            blocks[place], places[block] = block, place

    def forget(self, ids: Sequence[int]) -> None:
        self.pin([block for block in ids if self._places[block] != _NOWHERE])

    def victims(self, n: int) -> list[int]:
        if n > len(self._blocks):
            raise ValueError(f"{n} victims wanted, {len(self._blocks)} evictable")
        rest = len(self._blocks) - n
        victims = self._blocks[rest:][::-1]
        del self._blocks[rest:]
        for block in victims:
            self._places[block] = _NOWHERE
        return victims

    def step(
        self, now: float, soon: Iterable[bytes], dropped: Mapping[bytes, int]
    ) -> None:
        del now, soon, dropped

    def order(self) -> Iterator[int]:
        return reversed(self._blocks)

    def __len__(self) -> int:
        return len(self._blocks)

    def check(self) -> None:
        if any(self._places[b] != place for place, b in enumerate(self._blocks)):
            raise IntegrityError("random: a block is not at its place")
        if len(self._blocks) != len(self._places) - self._places.count(_NOWHERE):
            raise IntegrityError("random: a block that is gone has a place")
