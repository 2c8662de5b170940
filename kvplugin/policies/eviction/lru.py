"""Least recently used: a block's rank is the time of its last release."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from kvplugin.policies.eviction.base import BlockContext, BlockInfo


class LRU:
    """The order of vLLM 0.32's free queue among blocks that carry a hash.

    `release` appends, so of one request the pool should list the tail of a prefix
    before its head: the head then outlives the tail and a shorter prefix still hits.
    """

    def __init__(self) -> None:
        self._queue: OrderedDict[int, None] = OrderedDict()

    def bind(self, num_blocks: int, info: Callable[[int], BlockInfo]) -> None:
        del num_blocks, info

    def insert(self, ids: Sequence[int], ctx: BlockContext) -> None:
        del ids, ctx

    def hit(self, ids: Sequence[int], ctx: BlockContext) -> None:
        del ids, ctx  # recency is taken at release

    def pin(self, ids: Sequence[int]) -> None:
        for block in ids:
            del self._queue[block]

    def release(self, ids: Sequence[int]) -> None:
        self._queue.update(dict.fromkeys(ids))

    def forget(self, ids: Sequence[int]) -> None:
        for block in ids:
            self._queue.pop(block, None)

    def victims(self, n: int) -> list[int]:
        if n > len(self._queue):
            raise ValueError(f"{n} victims wanted, {len(self._queue)} evictable")
        pop = self._queue.popitem
        return [pop(last=False)[0] for _ in range(n)]

    def step(
        self, now: float, soon: Iterable[bytes], dropped: Mapping[bytes, int]
    ) -> None:
        del now, soon, dropped

    def order(self) -> Iterator[int]:
        return iter(self._queue)

    def __len__(self) -> int:
        return len(self._queue)

    def check(self) -> None:
        """An ordered set cannot disagree with itself."""
