"""State-space layers: a block holds a whole recurrent state, not tokens.

Where states are kept depends on the spec's `mamba_cache_mode`:

- ``none``: one block a request, however long; nothing is cached.
- ``all``: one state a block of tokens, each a possible hit.
- ``align``: the state after each step, in the block where the step ends. A row looks
  like ``[null, S, null, null, S, spec...]``: the scheduler ends the steps of a prefill
  at block boundaries, and states before the last are kept only through their key.

A hit needs one block: the state at its end. Drafts need `num_speculative_blocks` more
states beside the running one (a rejected token cannot be taken out of a state).
"""

from collections.abc import Iterable, Sequence

from kvplugin.block import NULL_BLOCK
from kvplugin.block_pool import BlockPool
from kvplugin.managers.base import (
    NEVER,
    ManagerSettings,
    SingleTypeKVCacheManager,
)
from kvplugin.request import RequestLike
from kvplugin.spec import MambaSpec, cdiv


class MambaManager(SingleTypeKVCacheManager):
    """Modes ``none`` and ``all``."""

    kind = "mamba"
    kv_cache_spec: MambaSpec

    def __init__(
        self,
        kv_cache_spec: MambaSpec,
        block_pool: BlockPool,
        settings: ManagerSettings,
    ) -> None:
        super().__init__(kv_cache_spec, block_pool, settings)
        self.num_speculative_blocks = kv_cache_spec.num_speculative_blocks
        self._cached_this_step: set[bytes | None] = set()
        self._checkpoints: dict[str, frozenset[int]] = {}

    def set_checkpoints(self, request_id: str, boundaries: Iterable[int]) -> None:
        """Keep states of this request only where one of `boundaries` (computed tokens)
        falls on a block's end; others lose their place in the cache at once."""
        self._checkpoints[request_id] = frozenset(boundaries)

    def find_longest_cache_hit(
        self,
        block_hashes: Sequence[bytes],
        max_length: int,
        kv_cache_group_ids: Sequence[int],
        alignment_tokens: int,
        use_eagle: bool = False,
    ) -> tuple[list[int], ...]:
        del use_eagle  # draft models have no state layers
        unit = alignment_tokens // self.block_size
        limit = min(max_length // self.block_size, len(block_hashes))
        for i in range(limit // unit * unit - 1, -1, -unit):
            states = self.block_pool.get_cached_block(
                block_hashes[i], kv_cache_group_ids
            )
            if states is not None:
                return tuple([NULL_BLOCK] * i + [state] for state in states)
        return tuple([] for _ in kv_cache_group_ids)

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[int],
        total_computed_tokens: int,
        num_tokens_main_model: int,
        whole_request: bool = False,
    ) -> int:
        """As in the base, but a state that another request computes in this very step
        cannot be copied from yet: the answer is then more than the pool has, and the
        request waits for the next step."""
        if new_computed_blocks and self._cached_this_step:
            key = self.block_pool.key_of(new_computed_blocks[-1])
            if key in self._cached_this_step:
                return self.block_pool.num_blocks + 1
        return self._count(
            request_id,
            num_tokens,
            new_computed_blocks,
            total_computed_tokens,
            num_tokens_main_model,
            whole_request,
        )

    def _count(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[int],
        total_computed_tokens: int,
        num_tokens_main_model: int,
        whole_request: bool,
    ) -> int:
        return super().get_num_blocks_to_allocate(
            request_id,
            num_tokens + self._speculative_tokens,
            new_computed_blocks,
            total_computed_tokens,
            num_tokens_main_model,
            whole_request,
        )

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[int]:
        return super().allocate_new_blocks(
            request_id, num_tokens + self._speculative_tokens, num_tokens_main_model
        )

    @property
    def _speculative_tokens(self) -> int:
        return self.num_speculative_blocks * self.block_size

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return num_computed_tokens - 1

    def remove_skipped_blocks(
        self, request_id: str, total_computed_tokens: int
    ) -> None:
        """As in the base, of what is settled."""
        super().remove_skipped_blocks(request_id, self._settled(total_computed_tokens))

    def _settled(self, total_computed_tokens: int) -> int:
        """Drafts among the computed tokens may yet be rejected: all are taken to be."""
        return max(total_computed_tokens - self.num_speculative_blocks, 0)

    def _cacheable(self, request_id: str, start: int, stop: int) -> list[int]:
        blocks = super()._cacheable(request_id, start, stop)
        kept = self._checkpoints.get(request_id)
        if kept is None:
            return blocks
        ends = range((start + 1) * self.block_size, NEVER, self.block_size)
        return [
            block if end in kept else NULL_BLOCK
            for block, end in zip(blocks, ends, strict=False)
        ]

    def _cached(
        self,
        request: RequestLike,
        start: int,
        stop: int,
        hashes: Sequence[bytes],
        given: Sequence[int],
        parent: bytes | None,
    ) -> None:
        super()._cached(request, start, stop, hashes, given, parent)
        row, key_of = self.req_to_blocks[request.request_id], self.block_pool.key_of
        self._cached_this_step.update(key_of(row[start + i]) for i in given)

    def new_step_starts(self) -> None:
        self._cached_this_step.clear()

    def free(self, request_id: str) -> None:
        self._checkpoints.pop(request_id, None)
        super().free(request_id)


class AlignedMambaManager(MambaManager):
    """Mode ``align``: of a row only the last state and those of drafts are blocks."""

    def __init__(
        self,
        kv_cache_spec: MambaSpec,
        block_pool: BlockPool,
        settings: ManagerSettings,
    ) -> None:
        super().__init__(kv_cache_spec, block_pool, settings)
        # Of each request the leading entries of its row that were given back.
        self._freed_until: dict[str, int] = {}
        self._allocated: set[str] = set()

    def _count(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[int],
        total_computed_tokens: int,
        num_tokens_main_model: int,
        whole_request: bool,
    ) -> int:
        del num_tokens
        row = self.req_to_blocks.get(request_id, [])
        have = len(row) + len(new_computed_blocks)
        external = 0
        if request_id not in self.num_cached_block:
            covered = cdiv(total_computed_tokens, self.block_size)
            skipped = self._num_skipped_blocks(total_computed_tokens)
            external = max(covered - max(skipped, have), 0)
            have = max(covered, have)
        new = self._required(num_tokens_main_model) - have
        if new > 0 and not whole_request:
            # Draft states of the step before serve again.
            again = request_id in self._allocated
            new = 1 if again else 1 + self.num_speculative_blocks
        hits = self.block_pool.num_evictable(new_computed_blocks)
        new = max(new, 0) + external + hits
        return self._up_to_the_peak(row, new) if whole_request else new

    def _required(self, num_tokens_main_model: int) -> int:
        # Lookahead tokens get no state: no draft model has state layers, and they
        # would move the step's end off the block boundary.
        return cdiv(num_tokens_main_model, self.block_size) + (
            self.num_speculative_blocks
        )

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[int]:
        """The row's new entries: null where no state is kept, then draft states that
        moved up from their old place, then new blocks."""
        del num_tokens
        row = self.req_to_blocks.setdefault(request_id, [])
        had = len(row)
        required = self._required(num_tokens_main_model)
        if required <= had:
            return []
        last = required - 1 - self.num_speculative_blocks
        row += [NULL_BLOCK] * (last - had)
        if request_id in self._allocated:
            self._move_draft_states(row, had, last)
        self._allocated.add(request_id)
        self._extend(row, required - len(row))
        return row[had:]

    def _move_draft_states(self, row: list[int], had: int, last: int) -> None:
        for i in range(had - self.num_speculative_blocks, min(had, last)):
            row.append(row[i])
            row[i] = NULL_BLOCK

    def remove_skipped_blocks(
        self, request_id: str, total_computed_tokens: int
    ) -> None:
        """All states before the last settled one, which was computed from them. With
        steps in flight there may be several, with nulls between them."""
        settled = self._settled(total_computed_tokens)
        row = self.req_to_blocks.get(request_id, [])
        start = self._freed_until.get(request_id, 0)
        stop = min(cdiv(settled, self.block_size) - 1, len(row))
        if start >= stop:
            return
        self._freed_until[request_id] = stop
        removed = [block for block in row[start:stop][::-1] if block != NULL_BLOCK]
        row[start:stop] = [NULL_BLOCK] * (stop - start)
        self.block_pool.free_blocks(removed)

    def rewind(self, request_id: str, num_computed_tokens: int) -> None:
        """Nothing gets its key again: a step leaves the state at its end only, and
        that need not be where a step ended before."""
        self._refuse_missing_blocks(request_id, num_computed_tokens)

    def max_live_blocks(self) -> int:
        """As in the base; without limits what a step at a time holds."""
        if self.settings.limits is None:
            return 2 + self.num_speculative_blocks
        return super().max_live_blocks()

    def free(self, request_id: str) -> None:
        self._allocated.discard(request_id)
        self._freed_until.pop(request_id, None)
        super().free(request_id)
