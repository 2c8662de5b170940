"""An inner policy that raises where a protecting one breaks the protocol."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from kvplugin.policies.eviction import LRU, BlockContext, BlockInfo


class StrictInner:
    """LRU that knows of each block whether it has no key, is in use or evictable, as
    far as it was told."""

    def __init__(self) -> None:
        self.lru = LRU()
        self.in_use: set[int] = set()
        self.evictable: set[int] = set()
        self.steps = 0

    def bind(self, num_blocks: int, info: Callable[[int], BlockInfo]) -> None:
        self.info = info
        self.lru.bind(num_blocks, info)

    def insert(self, ids: Sequence[int], ctx: BlockContext) -> None:
        self._all_among(ids, {*ids} - self.in_use - self.evictable)
        self.in_use |= {*ids}

    def hit(self, ids: Sequence[int], ctx: BlockContext) -> None:
        assert {*ids} <= self.in_use

    def pin(self, ids: Sequence[int]) -> None:
        self._all_among(ids, self.evictable)
        self.evictable -= {*ids}
        self.in_use |= {*ids}
        self.lru.pin(ids)

    def release(self, ids: Sequence[int]) -> None:
        self._all_among(ids, self.in_use)
        depths = [self.info(block).depth for block in ids]
        assert depths == sorted(depths, reverse=True), "a release is one request's"
        self.in_use -= {*ids}
        self.evictable |= {*ids}
        self.lru.release(ids)

    def forget(self, ids: Sequence[int]) -> None:
        self._all_among(ids, self.in_use | self.evictable)
        self.in_use -= {*ids}
        self.evictable -= {*ids}
        self.lru.forget(ids)

    def victims(self, n: int) -> list[int]:
        assert n <= len(self.evictable)
        victims = self.lru.victims(n)
        self.evictable -= {*victims}
        return victims

    def step(
        self, now: float, soon: Iterable[bytes], dropped: Mapping[bytes, int]
    ) -> None:
        self.steps += 1
        self.soon = list(soon)

    def order(self) -> Iterator[int]:
        return self.lru.order()

    def __len__(self) -> int:
        return len(self.lru)

    def check(self) -> None:
        self.lru.check()
        assert {*self.lru.order()} == self.evictable

    def _all_among(self, ids: Sequence[int], among: set[int]) -> None:
        assert len({*ids}) == len(ids)
        assert {*ids} <= among
