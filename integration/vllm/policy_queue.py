"""A block pool's free queue in the order of an eviction policy.

Free blocks stand in three rows, used up in this order:

    without a key (last in, first out) | ranked by the policy | last resort

A block of the last row has no key either, but somebody reads it until it is handed out
again. The policy is trusted with the order of the second row and nothing else
(`kvplugin/ranking.py`): whatever it does, no block is lost and none is used twice.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from operator import itemgetter
from typing import Any, Final

from kvplugin.errors import CapacityError, IntegrityError
from kvplugin.integration.vllm.policy_notes import KeyNotes
from kvplugin.integration.vllm.policy_walk import LinkedList, verified
from kvplugin.policies.eviction import (
    LRU,
    NO_CONTEXT,
    BlockContext,
    EvictionPolicy,
    needs,
)
from kvplugin.ranking import Ranking

# States of a block. `Ranking` takes them for reference counts: 0 can be chosen.
_RANKED: Final = 0
_IN_USE: Final = 1
_IN_USE_KEYED: Final = 2  # and the policy has heard of the key
_UNKEYED: Final = 3
_LAST_RESORT: Final = 4


class PolicyQueue:
    """Stands in for vLLM's `FreeKVCacheBlockQueue`, and tells a policy what happens.

    All methods of vLLM's queue take and return its block objects; what the pool
    reports on top of them (`insert`, `hit`, `forget`, `step`) names blocks by id.

    Args:
        blocks: all blocks of the pool by id; only `block_id` and `_block_hash` are
            read.
        free: ids of those that are free, none of them with a key, first one first.
        policy: the policy, not bound yet.
    """

    def __init__(
        self, blocks: Sequence[Any], free: Iterable[int], policy: EvictionPolicy
    ) -> None:
        self._blocks = blocks
        self._states = [_IN_USE] * len(blocks)
        self._unkeyed = [*free][::-1]  # popped from the end
        for block in self._unkeyed:
            self._states[block] = _UNKEYED
        self._last_resort: dict[int, None] = {}
        self.num_free_blocks = len(self._unkeyed)
        self._removed: list[Any] = []
        self.remove = self._removed.append
        """Take a free block out; it counts as free until `settle`."""
        self._linked = LinkedList(lambda: self.iter_blocks_after(None))
        self.fake_free_list_head = self._linked.head
        self.fake_free_list_tail = self._linked.tail

        self._policy_name = type(policy).__name__
        self.unpinning = False
        """Whether key-less blocks that are appended go to the last row."""
        self.hears_inserts = type(policy) is not LRU
        """Whether the pool has to report keys; LRU ranks by releases alone."""
        self.wants_info = needs(policy, "needs_info")
        """Whether `notes.place` makes a difference to the policy."""
        self.notes = KeyNotes(blocks if self.hears_inserts else [])
        """What the policy knows of keys, or can ask."""
        # Ranked blocks have a key, and which one it is, `Ranking` does not ask.
        self._ranking = Ranking(
            policy, self._states, [b""] * len(blocks), self.notes.info
        )

    # -- vLLM's queue --------------------------------------------------------------

    def popleft(self) -> Any:
        """Take the first free block.

        Raises:
            CapacityError: there is none.
        """
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[Any]:
        """Take the first `n` free blocks. All or nothing.

        Raises:
            CapacityError: fewer are free; nothing has changed.
        """
        self._settle_before_change()
        if n > self.num_free_blocks:
            raise CapacityError(f"{n} blocks wanted, {self.num_free_blocks} free")
        unkeyed = self._unkeyed
        first = len(unkeyed) - n
        if first >= 0:
            ids = unkeyed[first:][::-1]
            del unkeyed[first:]
        else:
            ids = unkeyed[::-1] + self._chosen(-first)
            unkeyed.clear()
        self.num_free_blocks -= n
        states, blocks = self._states, self._blocks
        for block in ids:
            states[block] = _IN_USE
        return [blocks[block] for block in ids]

    def append(self, block: Any) -> None:
        """`append_n` of one block."""
        self.append_n([block])

    def append_n(self, blocks: Sequence[Any]) -> None:
        """Free blocks that were in use; what should go first is listed first.

        Blocks with a key go to the policy, others to the row that is used first.
        """
        self._settle_before_change()
        ids = [block.block_id for block in blocks if block._block_hash is not None]
        if len(ids) < len(blocks):
            self.prepend_n([block for block in blocks if block._block_hash is None])
        if not ids:
            return
        states = self._states
        if self.hears_inserts:
            self._insert_unheard(ids)
        for block in ids:
            states[block] = _RANKED
        self.num_free_blocks += len(ids)
        self._ranking.release(ids)

    def prepend_n(self, blocks: Sequence[Any]) -> None:
        """Free blocks without a key that were in use; the first is used first."""
        self._settle_before_change()
        ids = [block.block_id for block in blocks]
        states = self._states
        if self.hears_inserts:
            self.forget([block for block in ids if states[block] == _IN_USE_KEYED])
        state = _LAST_RESORT if self.unpinning else _UNKEYED
        for block in ids:
            states[block] = state
        self.num_free_blocks += len(ids)
        if self.unpinning:
            self._last_resort.update(dict.fromkeys(ids))
        else:
            self._unkeyed += ids[::-1]

    def get_all_free_blocks(self) -> list[Any]:
        """Free blocks, first one first."""
        return list(self.iter_blocks_after(None))

    def iter_blocks_after(self, cursor: Any | None) -> Iterator[Any]:
        """Free blocks, first one first; the queue must not change meanwhile.

        Args:
            cursor: with LRU, the block after which to begin. Other policies change
                their order between two walks: a place in it means nothing, and the
                walk begins at the front.
        """
        self.settle()
        ids = self._order()
        if cursor is not None and (self.failures or not self.hears_inserts):
            any(block == cursor.block_id for block in ids)  # up to it, or all
        for block in ids:
            yield self._blocks[block]

    # -- what the pool reports -----------------------------------------------------

    @property
    def policy_name(self) -> str:
        """Class of the policy that ranks now."""
        return LRU.__name__ if self.failures else self._policy_name

    @property
    def failures(self) -> int:
        """How often the policy failed and was replaced by LRU."""
        return self._ranking.failures

    @property
    def wants_hits(self) -> bool:
        """Whether `hit` makes a difference to the policy."""
        return self._ranking.wants_hits

    @property
    def wants_steps(self) -> bool:
        """Whether `step` makes a difference to the policy."""
        return self._ranking.wants_steps

    @property
    def wants_demand(self) -> bool:
        """Whether `step` is to be told which keys waiting requests want."""
        return self._ranking.wants_demand

    def settle(self) -> None:
        """Blocks that were removed one by one come into use in one call.

        Raises:
            IntegrityError: one of them is not free.
        """
        if not self._removed:
            return
        ids = [block.block_id for block in self._removed]
        self._removed.clear()
        states = self._states
        if any(self._states_of(ids)):
            self._take_unkeyed([block for block in ids if states[block]])
            ids = [block for block in ids if not states[block]]
        self.num_free_blocks -= len(ids)
        for block in ids:
            states[block] = _IN_USE_KEYED
        if ids:
            self._ranking.pin(ids)

    def insert(self, ids: Sequence[int], ctx: BlockContext) -> None:
        """Blocks have a key; those in use whose key is news are told of."""
        states = self._states
        if self._states_of(ids).count(_IN_USE) != len(ids):
            known = [block for block in ids if states[block] == _IN_USE_KEYED]
            self.forget(self.notes.changed(known))
            ids = [block for block in ids if states[block] == _IN_USE]
        for block in ids:
            states[block] = _IN_USE_KEYED
        self.notes.take_keys(ids)
        if ids:
            self._ranking.insert(ids, ctx)

    def hit(self, ids: Sequence[int], ctx: BlockContext) -> None:
        """A request adopted these blocks, all in use now."""
        if not self._are_known(ids):
            ids = [block for block in ids if self._states[block] == _IN_USE_KEYED]
        if ids:
            self._ranking.hit(ids, ctx)

    def forget(self, ids: Iterable[int]) -> None:
        """Keys are lost; of blocks whose key the policy does not know, nothing."""
        states = self._states
        known = [b for b in ids if states[b] in (_RANKED, _IN_USE_KEYED)]
        if not known:
            return
        idle = [block for block in known if states[block] == _RANKED]
        self._ranking.forget(known, len(idle))
        for block in known:
            states[block] = _IN_USE
        for block in idle:
            states[block] = _UNKEYED
        self._unkeyed += idle

    def forget_all(self) -> None:
        """All keys are lost. Blocks that were ranked are used after those that had no
        key before, in the order that they had."""
        places = {block: place for place, block in enumerate(self._ranked())}
        before, self._unkeyed = self._unkeyed, []
        self.forget(range(len(self._states)))
        last = len(places)
        self._unkeyed.sort(key=lambda block: places.get(block, last), reverse=True)
        self._unkeyed += before

    def step(
        self, now: float, soon: Iterable[bytes], dropped: Mapping[bytes, int]
    ) -> None:
        """The engine's step begins; for the policy, see there."""
        self._ranking.step(now, soon, dropped)

    def check(self) -> None:
        """Verify queue and policy, in O(blocks).

        Raises:
            IntegrityError: naming what does not hold.
        """
        self.settle()
        states, blocks = self._states, self._blocks
        rows = {
            _RANKED: [b for b, state in enumerate(states) if state == _RANKED],
            _UNKEYED: self._unkeyed,
            _LAST_RESORT: self._last_resort,
        }
        for state, row in rows.items():
            if len(set(row)) != len(row) or states.count(state) != len(row):
                raise IntegrityError("a free block is queued twice or not at all")
            if any(states[block] != state or blocks[block].ref_cnt for block in row):
                raise IntegrityError("a block in use is queued as free")
        if self.num_free_blocks != sum(map(len, rows.values())):
            raise IntegrityError("free blocks are miscounted")
        if any(blocks[block]._block_hash is None for block in rows[_RANKED]):
            raise IntegrityError("a block without a key is ranked")
        self._ranking.check()

    # -- inside --------------------------------------------------------------------

    def _settle_before_change(self) -> None:
        if self._removed:
            self.settle()
        if self._linked:
            self._linked.cut()

    def _chosen(self, n: int) -> list[int]:
        """Blocks of the second row, then of the last; there are enough."""
        num_ranked = min(n, len(self._ranking))
        ids = self._ranking.victims(num_ranked) if num_ranked else []
        for block in [*islice(self._last_resort, n - num_ranked)]:
            del self._last_resort[block]
            ids.append(block)
        return ids

    def _take_unkeyed(self, ids: Iterable[int]) -> None:
        for block in ids:
            if self._states[block] == _LAST_RESORT:
                del self._last_resort[block]
            elif self._states[block] == _UNKEYED:
                self._unkeyed.remove(block)
            else:
                raise IntegrityError(f"block {block} is taken and was not free")
            self._states[block] = _IN_USE
            self.num_free_blocks -= 1

    def _insert_unheard(self, ids: Sequence[int]) -> None:
        """Somebody may have given blocks a key behind the pool's back: they are told of
        now, and their place is unknown."""
        if not self._are_known(ids):
            unheard = [b for b in ids if self._states[b] != _IN_USE_KEYED]
            self.notes.displace(unheard)
            self.insert(unheard, NO_CONTEXT)

    def _are_known(self, ids: Sequence[int]) -> bool:
        return self._states_of(ids).count(_IN_USE_KEYED) == len(ids)

    def _states_of(self, ids: Sequence[int]) -> Sequence[int]:
        if len(ids) > 1:
            return itemgetter(*ids)(self._states)
        return [self._states[block] for block in ids]

    def _order(self) -> Iterator[int]:
        yield from reversed(self._unkeyed)
        yield from self._ranked()
        yield from self._last_resort

    def _ranked(self) -> Iterator[int]:
        return verified(self._ranking.order, self._states, self.policy_name)
