"""The free list of vLLM 0.19.1, for `Parity.single_free_list`."""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice
from typing import Any

from kvplugin.block_pool import BlockPool
from kvplugin.errors import CapacityError, IntegrityError


class SingleListPool(BlockPool):
    """A pool that takes free blocks in the order in which they were freed, with a key
    or without; the eviction policy is told everything and asked nothing."""

    def __init__(self, num_blocks: int, **options: Any) -> None:
        super().__init__(num_blocks, **options)
        self._free = OrderedDict.fromkeys(range(1, num_blocks))

    def get_new_blocks(self, n: int) -> list[int]:
        """The `n` blocks that have been free longest.

        Raises:
            CapacityError: fewer than `n` blocks are free; nothing has changed.
        """
        if n > len(self._free):
            raise CapacityError(f"{n} blocks wanted, {len(self._free)} free")
        chosen = list(islice(self._free, n))
        self.evict_blocks(chosen)
        for block in chosen:
            self._unkeyed.remove(block)
        self._unkeyed += reversed(chosen)
        taken = super().get_new_blocks(n)
        self._forget_order(taken)
        return taken

    def touch(self, ids: Iterable[int]) -> None:
        """As in the base."""
        ids = list(ids)
        super().touch(ids)
        self._forget_order(ids)

    def free_blocks(self, ids: Iterable[int]) -> None:
        """As in the base; blocks that fall free queue up in the order given."""
        ids = list(ids)
        super().free_blocks(ids)
        for block in ids:
            if block and not self.ref_count(block):
                self._free[block] = None

    def _forget_order(self, ids: Iterable[int]) -> None:
        for block in ids:
            self._free.pop(block, None)

    def check(self) -> None:
        """As in the base, and the list."""
        super().check()
        free = [b for b in range(1, self.num_blocks) if not self.ref_count(b)]
        if sorted(self._free) != free:
            raise IntegrityError("the list differs from the free blocks")
