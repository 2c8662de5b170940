"""The free queue by itself, on blocks that only look like vLLM's."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest

from kvplugin.errors import CapacityError, IntegrityError
from kvplugin.hashing import make_key
from kvplugin.integration.vllm.policy_queue import PolicyQueue
from kvplugin.policies.eviction import LRU, NO_CONTEXT, EvictionPolicy
from tests.core.eviction_faults import RandomPolicy


@dataclass(eq=False)
class Block:
    block_id: int
    ref_cnt: int = 0
    is_null: bool = False
    _block_hash: bytes | None = None
    next_free_block: Any = None

    @property
    def block_hash(self) -> bytes | None:
        return self._block_hash


class Queue(PolicyQueue):
    """With what a pool does around it."""

    def __init__(self, num_blocks: int, policy: EvictionPolicy | None = None) -> None:
        self.blocks = [Block(i) for i in range(num_blocks)]
        super().__init__(
            self.blocks, range(1, num_blocks), LRU() if policy is None else policy
        )

    def take(self, n: int) -> list[Any]:
        taken = self.popleft_n(n)
        for block in taken:
            block.ref_cnt, block._block_hash = 1, None
        return taken

    def cache(self, blocks: list[Any]) -> list[Any]:
        """Give blocks in use keys and free them."""
        for block in blocks:
            block._block_hash = make_key(b"%032d" % block.block_id, 0)
        if self.hears_inserts:
            self.insert(ids(blocks), NO_CONTEXT)
        return self.free(blocks)

    def free(self, blocks: list[Any]) -> list[Any]:
        for block in blocks:
            block.ref_cnt = 0
        self.append_n(blocks)
        return blocks


def ids(blocks: Any) -> list[int]:
    return [block.block_id for block in blocks]


def test_blocks_go_out_in_their_first_order() -> None:
    queue = Queue(5)
    assert ids([queue.popleft(), *queue.popleft_n(2)]) == [1, 2, 3]
    assert queue.popleft_n(0) == []
    assert queue.num_free_blocks == 1


def test_key_less_blocks_go_first_and_last_freed_first() -> None:
    queue = Queue(7)
    a, b, c, d, e = queue.take(5)
    queue.cache([a, b])
    queue.free([c])
    queue.prepend_n([d, e])
    assert ids(queue.get_all_free_blocks()) == [4, 5, 3, 6, 1, 2]
    assert ids(queue.take(6)) == [4, 5, 3, 6, 1, 2]


def test_one_call_sorts_blocks_with_and_without_key() -> None:
    queue = Queue(6)
    a, b, c, d, _ = queue.take(5)
    a._block_hash = c._block_hash = b"k" * 36
    queue.free([a, b, c, d])
    assert ids(queue.get_all_free_blocks()) == [2, 4, 1, 3]
    queue.check()


def test_too_many_blocks_change_nothing() -> None:
    queue = Queue(4)
    queue.cache(queue.take(2))
    with pytest.raises(CapacityError, match="4 blocks wanted, 3 free"):
        queue.popleft_n(4)
    assert queue.num_free_blocks == len(queue.get_all_free_blocks()) == 3
    queue.take(3)
    with pytest.raises(CapacityError):
        queue.popleft()


def test_blocks_that_are_removed_are_in_use_after_settling() -> None:
    queue = Queue(6)
    a, b, c = queue.cache(queue.take(3))
    for block in (b, queue.blocks[5]):
        queue.remove(block)
        block.ref_cnt = 1
    queue.settle()
    assert queue.num_free_blocks == 3
    assert ids(queue.get_all_free_blocks()) == ids([queue.blocks[4], a, c])
    queue.check()


def test_removal_settles_before_the_next_change() -> None:
    queue = Queue(4)
    a, b, _ = queue.cache(queue.take(3))
    queue.remove(a)
    assert ids(queue.take(2)) == [b.block_id, 3]
    with pytest.raises(CapacityError):
        queue.popleft()


def test_a_used_block_cannot_be_removed() -> None:
    queue = Queue(3)
    (block,) = queue.take(1)
    queue.remove(block)
    with pytest.raises(IntegrityError, match="was not free"):
        queue.settle()
    assert queue.num_free_blocks == 1
    queue.check()


def test_blocks_that_are_unpinned_without_a_key_go_last() -> None:
    queue = Queue(6)
    a, b, c, d, e = queue.take(5)
    queue.cache([a])
    queue.unpinning = True
    queue.free([b, c])
    queue.unpinning = False
    queue.free([d])
    queue.cache([e])
    queue.check()
    assert ids(queue.get_all_free_blocks()) == [4, 1, 5, 2, 3]
    queue.remove(b)
    b.ref_cnt = 1
    queue.check()
    assert ids(queue.take(4)) == [4, 1, 5, 3]


def test_walk_goes_on_after_the_cursor_as_long_as_recency_ranks() -> None:
    queue = Queue(6)
    blocks = queue.cache(queue.take(5))
    assert ids(queue.iter_blocks_after(blocks[1])) == [3, 4, 5]
    assert ids(queue.iter_blocks_after(blocks[4])) == []
    assert list(queue.iter_blocks_after(queue.blocks[0])) == []


def test_walk_of_another_policy_begins_at_the_front() -> None:
    queue = Queue(6, RandomPolicy(3))
    queue.cache(queue.take(5))
    first, *_, last = queue.iter_blocks_after(None)
    assert next(queue.iter_blocks_after(last)) is first


def test_policy_that_lies_about_its_order_misleads_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Lies(LRU):
        def order(self) -> Iterator[Any]:
            yield from (3, 3, 0, "x", 1)
            raise RuntimeError("no more")

    queue = Queue(6, Lies())
    queue.cache(queue.take(4))
    assert ids(queue.get_all_free_blocks()) == [5, 3, 1]
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert queue.num_free_blocks == 5


def test_lost_keys_of_all_blocks_keep_their_order() -> None:
    queue = Queue(8)
    a, b, c, d, e = queue.take(5)
    queue.cache([b, a])
    queue.cache([c])
    queue.free([d])
    order = ids(queue.get_all_free_blocks())
    queue.forget_all()
    queue.free([e])
    assert ids(queue.get_all_free_blocks()) == [5, *order]


def test_what_does_not_hold_is_found() -> None:
    queue = Queue(5)
    a, _ = queue.cache(queue.take(2))
    queue.check()
    a.ref_cnt = 1
    with pytest.raises(IntegrityError, match="in use is queued as free"):
        queue.check()
    a.ref_cnt, a._block_hash = 0, None
    with pytest.raises(IntegrityError, match="without a key is ranked"):
        queue.check()
    a._block_hash = b"k" * 36
    queue.num_free_blocks += 1
    with pytest.raises(IntegrityError, match="miscounted"):
        queue.check()


# -- the linked list of vLLM 0.19 --------------------------------------------------


def walk(queue: PolicyQueue, cursor: Any, n: int) -> tuple[list[Any], Any]:
    """As vLLM 0.19's offload manager does in each step: (blocks, new cursor)."""
    if cursor is not None and cursor.ref_cnt > 0:
        cursor = None
    at = queue.fake_free_list_head if cursor is None else cursor
    node = at.next_free_block
    found = []
    while node is not None and node is not queue.fake_free_list_tail and n > 0:
        cursor = node
        if node.block_hash is not None and not node.is_null:
            found.append(node)
        n -= 1
        node = node.next_free_block
    return found, cursor


def test_links_lead_through_all_blocks_and_go_on_from_a_cursor() -> None:
    queue = Queue(1001)
    blocks = queue.cache(queue.take(1000))
    first, cursor = walk(queue, None, 300)
    second, cursor = walk(queue, cursor, 2000)
    assert ids(first + second) == ids(blocks)
    assert walk(queue, cursor, 10)[0] == []


def test_links_lead_back_to_the_front_after_a_change() -> None:
    queue = Queue(10)
    blocks = queue.cache(queue.take(9))
    _, cursor = walk(queue, None, 5)
    queue.take(2)
    found, cursor = walk(queue, cursor, 100)
    assert found == blocks[2:]
    queue.take(7)
    assert walk(queue, cursor, 100)[0] == []


def test_links_never_show_a_used_block() -> None:
    random = Random(7)
    queue = Queue(600)
    used: list[Any] = queue.take(599)
    cursor = None
    for _ in range(400):
        random.shuffle(used)
        if random.random() < 0.5:
            split = random.randrange(len(used) + 1)
            queue.cache(used[:split])
            used = used[split:]
        else:
            used += queue.take(random.randrange(queue.num_free_blocks + 1))
        if random.random() < 0.7:
            found, cursor = walk(queue, cursor, random.randrange(1, 400))
            assert all(block.ref_cnt == 0 for block in found)
            assert len(set(found)) == len(found)
    queue.check()
