"""Walks over a free queue, for who reads it without taking from it.

vLLM's offload manager walks in every step, and 0.19's follows the links of vLLM's own
queue: it holds a block between two steps and goes on from its `next_free_block`. Here
links are made while it goes, and lead back to the front once the queue has changed: an
old link could end at a block that is in use by now.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice, pairwise
from typing import Any, Final

logger = logging.getLogger("vllm.kvplugin.policy_queue")

_LINKS_AT_ONCE: Final = 256


def verified(
    order: Callable[[], Iterator[int]], states: Sequence[int], policy_name: str
) -> Iterator[int]:
    """Blocks in the order that a policy tells, lazily, however it fails.

    What is not to be ranked, or comes twice, is left out, and so is the rest when the
    policy raises.

    Args:
        order: a policy's.
        states: 0 for each block that is to be ranked.
        policy_name: for the log.
    """
    seen: set[int] = set()
    ids = range(len(states))
    try:
        for block in islice(order(), len(states)):
            if block in ids and not states[block] and block not in seen:
                seen.add(block)
                yield block
    except Exception:
        logger.exception("eviction policy %s cannot tell its order", policy_name)


class Joint:
    """Stands between blocks and looks like one that nobody uses or can store.

    Args:
        find: what comes next; asked once.
    """

    block_id = -1
    block_hash = None
    ref_cnt = 0
    is_null = True

    def __init__(self, find: Callable[[], Any]) -> None:
        self._find = find
        self._next: Any = None

    @property
    def next_free_block(self) -> Any:
        if self._next is None:
            self._next = self._find()
        return self._next

    @next_free_block.setter
    def next_free_block(self, block: Any) -> None:
        self._next = block


class LinkedList:
    """Links the blocks of a queue as far as somebody follows them.

    Args:
        order: the blocks, first one first.
    """

    def __init__(self, order: Callable[[], Iterator[Any]]) -> None:
        self._order = order
        self.head: Final = Joint(self._begin)
        self.tail: Final = Joint(lambda: None)
        self._linked: list[Any] = []

    def __bool__(self) -> bool:
        """Whether there are links that a change of the queue makes wrong."""
        return bool(self._linked)

    def cut(self) -> None:
        """The queue is about to change: every link leads back to the front."""
        for block in self._linked:
            block.next_free_block = self.head
        self._linked.clear()
        self.head.next_free_block = None  # is to be found again

    def _begin(self) -> Any:
        self._linked.append(self.head)
        return self._link(self._order())

    def _link(self, rest: Iterator[Any]) -> Any:
        blocks = [*islice(rest, _LINKS_AT_ONCE)]
        if not blocks:
            return self.tail
        blocks.append(Joint(partial(self._link, rest)))
        for block, following in pairwise(blocks):
            block.next_free_block = following
        self._linked += blocks
        return blocks[0]
