"""A vLLM block pool through the calls of vLLM's managers, stock or with a policy.

Works under each supported version; vLLM is imported by whoever brings the pool.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hypothesis import strategies as st

from kvplugin.errors import IntegrityError
from kvplugin.policies.eviction import LRU, BlockContext
from tests.oracles import vllm_core

BLOCK_SIZE = 4
NUM_BLOCKS = 24

Op = tuple[str, int, int]
OPS: dict[str, int] = {
    "start": 6,
    "extend": 2,
    "finish": 4,
    "pin": 1,
    "unpin": 1,
    "evict used": 1,
    "evict free": 1,
    "reset": 1,
}
"""Names of what `Drive` does, and how often compared with each other."""


def ops(*left_out: str) -> st.SearchStrategy[list[Op]]:
    names = [name for name, weight in OPS.items() for _ in range(weight)]
    one = st.tuples(
        st.sampled_from([name for name in names if name not in left_out]),
        st.integers(0, 5),
        st.integers(0, 9),
    )
    return st.lists(one, max_size=60)


class Drive:
    """Plays requests against a pool; what does not fit is left out."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.log: list[Any] = []
        self._hasher = vllm_core.hasher(BLOCK_SIZE)
        self._live: list[tuple[Any, list[Any], int]] = []
        self._pins: list[list[Any]] = []
        self._count = 0

    def run(self, ops: Iterable[Op]) -> list[Any]:
        """The ids and events that the pool gave."""
        for op, a, b in ops:
            getattr(self, "_" + op.replace(" ", "_"))(a, b)
            self.log.append(self.pool.get_num_free_blocks())
            self.log += map(str, self.pool.take_events())
            if getattr(self.pool, "kvp", None) is not None:
                self.pool.kvp.check()
        return self.log

    def finish_all(self) -> None:
        """Free everything."""
        while self._live:
            self._finish(0, 0)
        while self._pins:
            self._unpin(0, 0)

    def _start(self, prefix: int, length: int) -> None:
        """A request of a family; longer ones of a family begin like shorter ones."""
        self._count += 1
        tokens = [prefix] * BLOCK_SIZE * (length + 1)
        if length % 3 == 0:
            tokens += [1000 + self._count] * BLOCK_SIZE
        request = vllm_core.request(f"r{self._count}", tokens, self._hasher)
        hits: list[Any] = []
        for block_hash in request.block_hashes:
            found = self.pool.get_cached_block(block_hash, [0])
            if found is None:
                break
            hits += found
        num_new = len(request.block_hashes) - len(hits)
        idle = len([block for block in hits if not block.ref_cnt])
        if idle + num_new > self.pool.get_num_free_blocks():
            return
        self.pool.admitting = request
        self.pool.touch(hits)
        self.pool.admitting = None
        new = self.pool.get_new_blocks(num_new)
        self.log.append([block.block_id for block in hits + new])
        self._live.append((request, hits + new, len(hits)))
        if length % 2:
            self._extend(-1, length)

    def _extend(self, which: int, by: int) -> None:
        if not self._live:
            return
        which %= len(self._live)
        request, blocks, cached = self._live[which]
        full = min(cached + by, len(blocks))
        self.pool.cache_full_blocks(
            request=request,
            blocks=blocks,
            num_cached_blocks=cached,
            num_full_blocks=full,
            block_size=BLOCK_SIZE,
            kv_cache_group_id=0,
        )
        self._live[which] = request, blocks, max(cached, full)

    def _finish(self, which: int, _: int) -> None:
        if self._live:
            _, blocks, _ = self._live.pop(which % len(self._live))
            self.pool.free_blocks(reversed(blocks))

    def _pin(self, first: int, step: int) -> None:
        """As a connector does."""
        keyed = [b for b in self.pool.blocks if b.block_hash is not None]
        blocks = keyed[first :: step + 2]
        self.pool.touch(blocks)
        self._pins.append(blocks)

    def _unpin(self, which: int, _: int) -> None:
        if self._pins:
            self.pool.free_blocks(self._pins.pop(which % len(self._pins)))

    def _evict_used(self, first: int, step: int) -> None:
        self._evict([b for b in self.pool.blocks if b.ref_cnt], first, step)

    def _evict_free(self, first: int, step: int) -> None:
        self._evict([b for b in self.pool.blocks if not b.ref_cnt], first, step)

    def _evict(self, blocks: list[Any], first: int, step: int) -> None:
        self.pool.evict_blocks({block.block_id for block in blocks[first :: step + 1]})

    def _reset(self, a: int, _: int) -> None:
        if a == 0:
            self.finish_all()
        self.log.append(self.pool.reset_prefix_cache())


class Strict(LRU):
    """LRU that raises when the pool breaks the protocol.

    Args:
        reads_info: asks about every block that it is told of.
    """

    needs_info = True
    needs_hits = True

    def __init__(self) -> None:
        super().__init__()
        self.keyed: dict[int, Any] = {}
        self.evictable: set[int] = set()

    def bind(self, num_blocks: int, info: Callable[[int], Any]) -> None:
        super().bind(num_blocks, info)
        self.info = info

    def insert(self, ids: Sequence[int], ctx: BlockContext) -> None:
        self._expect(ids and not self.keyed.keys() & set(ids))
        self.keyed |= {block: self.info(block) for block in ids}

    def hit(self, ids: Sequence[int], ctx: BlockContext) -> None:
        self._expect(ids and set(ids) <= self.keyed.keys() - self.evictable)
        self._look(ids)

    def pin(self, ids: Sequence[int]) -> None:
        self._expect(ids and set(ids) <= self.evictable)
        self.evictable -= set(ids)
        self._look(ids)
        super().pin(ids)

    def release(self, ids: Sequence[int]) -> None:
        self._expect(ids and set(ids) <= self.keyed.keys() - self.evictable)
        self._look(ids)
        self.evictable |= set(ids)
        super().release(ids)

    def forget(self, ids: Sequence[int]) -> None:
        self._expect(ids and set(ids) <= self.keyed.keys())
        self._look(ids)
        self.evictable -= set(ids)
        self._drop(ids)
        super().forget(ids)

    def victims(self, n: int) -> list[int]:
        chosen = super().victims(n)
        self._expect(set(chosen) <= self.evictable)
        self._look(chosen)
        self.evictable -= set(chosen)
        self._drop(chosen)
        return chosen

    def _drop(self, ids: Sequence[int]) -> None:
        for block in ids:
            del self.keyed[block]

    def _look(self, ids: Sequence[int]) -> None:
        self._expect(all(self.info(block) == self.keyed[block] for block in ids))

    def _expect(self, holds: object) -> None:
        if not holds:
            raise IntegrityError("the pool broke the protocol")
