"""What the managers of all attention types share.

A manager keeps, for the requests that hold blocks, one *row* each: the block ids of
its group, in the order of the request's tokens, with the null block where a block is
not needed any more. Rows only grow at their end. An admission walks

    find_longest_cache_hit        which cached blocks serve this request?   (no change)
    get_num_blocks_to_allocate    how many free blocks will it take?        (no change)
    add_local_computed_blocks     adopt the hits
    allocate_external_computed_blocks   room for tokens that a connector brings
    allocate_new_blocks           room for tokens to compute
    cache_blocks                  give full blocks their keys

and a running request repeats `remove_skipped_blocks` and the last two. Names and
results are those of vLLM 0.19.1 (`v1/core/single_type_kv_cache_manager.py`); rows and
arguments hold block ids where vLLM holds objects.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from kvplugin.block import NULL_BLOCK
from kvplugin.block_pool import BlockPool
from kvplugin.errors import ConfigError, IntegrityError
from kvplugin.hashing import CoarseRule, coarse_hashes
from kvplugin.managers.stored import stored_event
from kvplugin.parity import NO_PARITY, Parity
from kvplugin.policies.eviction import NO_CONTEXT, BlockContext, context_of
from kvplugin.request import RequestError, RequestLike
from kvplugin.spec import EngineLimits, KVCacheSpec, cdiv
from kvplugin.token_check import TokenCheck

ALWAYS: Final = -1
"""`quiet_until` of a manager that wants to see every step."""
NEVER: Final = 1 << 62
"""`quiet_until` of a manager that a longer request does not concern."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerSettings:
    """What a manager is told beside its spec."""

    group: int = 0
    """Number of its group."""
    enable_caching: bool = True
    hash_block_size: int | None = None
    """Tokens that one of a request's hashes covers; the block size if None."""
    coarse_rule: CoarseRule = "last"
    """How the hash of a longer block comes from those of its parts."""
    limits: EngineLimits | None = None
    """How long requests and steps are, for the admission of windows; None bills
    every group at full length."""
    context_parallel_size: int = 1
    """Ranks that share a sequence: decode times prefill context parallel size."""
    report_new_blocks: bool = False
    """Whether `take_new_block_ids` lists this group's blocks, for zeroing."""
    token_check: TokenCheck | None = None
    """Told which blocks were given a key, if hits must be proven by tokens."""
    parity: Parity = NO_PARITY


class SingleTypeKVCacheManager(ABC):
    """Blocks of one group.

    Args:
        kv_cache_spec: the layers' common spec.
        block_pool: where blocks come from.
        settings: everything else.

    Raises:
        ConfigError: the spec and the settings do not go together.
    """

    kind: ClassVar[str] = "unknown"
    """Name of the attention type in events, as in vLLM 0.32's `KVCacheSpecKind`."""
    allows_context_parallel: ClassVar[bool] = False
    sized_by_encoder_tokens: ClassVar[bool] = False
    """Rows cover the encoder's tokens, not the request's."""
    hits_are_downward_closed: ClassVar[bool] = False
    """Whether every shorter prefix of a hit is a hit."""

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        block_pool: BlockPool,
        settings: ManagerSettings,
    ) -> None:
        cp_size = settings.context_parallel_size
        if cp_size > 1 and not self.allows_context_parallel:
            raise ConfigError(
                f"context parallelism does not work with {self.kind} groups: set "
                f"decode and prefill context parallel size to 1, got {cp_size}"
            )
        self.kv_cache_spec = kv_cache_spec
        self.block_pool = block_pool
        self.settings = settings
        self.block_size = kv_cache_spec.block_size * cp_size
        self.enable_caching = settings.enable_caching
        self.kv_cache_group_id = settings.group
        self._hash_block_size = settings.hash_block_size or self.block_size
        self._coarse_rule = settings.coarse_rule
        if settings.enable_caching:
            self.coarse_hashes([])  # refuses sizes that do not divide
        self.req_to_blocks: dict[str, list[int]] = {}
        self.num_cached_block: dict[str, int] = {}
        """Leading blocks of a row that need no key any more. A request is in here
        once it was admitted."""
        self._rewound: set[str] = set()
        """Requests with blocks behind those that may have kept their key."""
        self._new_block_ids: list[int] = []

    # -- lookup --------------------------------------------------------------------

    @abstractmethod
    def find_longest_cache_hit(
        self,
        block_hashes: Sequence[bytes],
        max_length: int,
        kv_cache_group_ids: Sequence[int],
        alignment_tokens: int,
        use_eagle: bool = False,
    ) -> tuple[list[int], ...]:
        """The longest cached prefix that this attention type can start from.

        Args:
            block_hashes: one hash a block of this group, see `coarse_hashes`.
            max_length: most tokens of the hit.
            kv_cache_group_ids: groups of this spec; a block counts only if all of
                them have it.
            alignment_tokens: the hit is a multiple of this, a multiple of the block
                size.
            use_eagle: a draft model must see the last cached tokens again, so the
                block behind the hit must be cached too (it may lie behind
                `max_length`). A condition, not a drop: asked again of its own answer,
                a group gives the same one.

        Returns:
            A row a group, all of one length; the hit is that length times the block
            size. Blocks that the attention type will not read are null.
        """

    def coarse_hashes(self, block_hashes: Sequence[bytes]) -> Sequence[bytes]:
        """One hash for each full block of this group."""
        if self._hash_block_size == self.block_size:
            return block_hashes
        return coarse_hashes(
            block_hashes, self._hash_block_size, self.block_size, self._coarse_rule
        )

    @property
    def _drops_blindly(self) -> bool:
        """Whether to serve a draft model 0.19.1's way: look up, then drop a block."""
        return self.settings.parity.draft_drop_per_lookup

    # -- counting ------------------------------------------------------------------

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[int],
        total_computed_tokens: int,
        num_tokens_main_model: int,
        whole_request: bool = False,
    ) -> int:
        """Free blocks that the allocation to come takes.

        Args:
            request_id: the request.
            num_tokens: tokens that need a slot, those that have one included.
            new_computed_blocks: hits not adopted yet; those that nobody uses sit
                among the free blocks and count.
            total_computed_tokens: computed tokens, local and external.
            num_tokens_main_model: `num_tokens` without lookahead.
            whole_request: the tokens will come in many steps, and blocks that fall
                out of a window serve again: answer the peak.
        """
        row = self.req_to_blocks.get(request_id, ())
        have = len(row)
        required = cdiv(num_tokens, self.block_size)
        if request_id in self.num_cached_block:
            new = max(required - have, 0)
        else:
            skipped = self._num_skipped_blocks(total_computed_tokens)
            new = max(required - max(skipped, have + len(new_computed_blocks)), 0)
            if new_computed_blocks:
                adopted = new_computed_blocks[max(skipped - have, 0) :]
                new += self.block_pool.num_evictable(adopted)
        return self._up_to_the_peak(row, new) if whole_request else new

    def _up_to_the_peak(self, row: Sequence[int], new: int) -> int:
        """Of `new` blocks those that a request needs at a time beside its own."""
        live = len(row) - row.count(NULL_BLOCK)
        return min(new, max(self.max_live_blocks() - live, 0))

    def max_live_blocks(self) -> int:
        """Most blocks that one request owns at a time, however long it is: what
        memory was sized by, so that a length that fits at start is admitted."""
        limits = self.settings.limits
        return (
            NEVER
            if limits is None
            else self.kv_cache_spec.max_blocks_per_request(limits)
        )

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Leading tokens that no later token will attend to."""
        del num_computed_tokens
        return 0

    def _num_skipped_blocks(self, num_computed_tokens: int) -> int:
        """Leading blocks that no later token will attend to."""
        return max(self.get_num_skipped_tokens(num_computed_tokens), 0) // (
            self.block_size
        )

    def quiet_until(self, request_id: str, total_computed_tokens: int) -> int:
        """Up to which length (computed, new and lookahead tokens) an admitted request
        needs nothing from this manager: no block, no key, no block to give back.

        A lower answer only costs time; `ALWAYS` is right for every manager.
        """
        limit = len(self.req_to_blocks[request_id]) * self.block_size
        if self.enable_caching:
            cached = self.num_cached_block.get(request_id, 0)
            limit = min(limit, (cached + 1) * self.block_size - 1)
        return min(limit, self._keeps_all_until(total_computed_tokens))

    def _keeps_all_until(self, total_computed_tokens: int) -> int:
        """Up to which computed length no further block of a row is skipped."""
        del total_computed_tokens
        return ALWAYS

    # -- allocation ----------------------------------------------------------------

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[int],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
        ctx: BlockContext | None = NO_CONTEXT,
    ) -> None:
        """Adopt the hits of a request that is admitted; null blocks stand for what is
        skipped. Does nothing for a request that has its row. The eviction policy hears
        of a hit from `ctx`; None: the request comes back after a preemption, and what
        it finds of its own says nothing about reuse.

        Raises:
            IntegrityError: hits for a request that has blocks, or without caching.
        """
        if request_id in self.num_cached_block:
            self._refuse_hits(request_id, new_computed_blocks)
            return
        if self.req_to_blocks.get(request_id):
            raise IntegrityError(
                f"request {request_id} has blocks before its admission"
            )
        total = num_local_computed_tokens + num_external_computed_tokens
        skipped = self._num_skipped_blocks(total)
        hits = list(new_computed_blocks[skipped:])
        if not self.enable_caching:
            self._refuse_hits(request_id, hits)
        if ctx is None:
            self.block_pool.touch(hits)
        else:
            self.block_pool.adopt(hits, ctx)
        row = [NULL_BLOCK] * skipped + hits
        self.req_to_blocks[request_id] = row
        self.num_cached_block[request_id] = len(row)

    def allocate_external_computed_blocks(
        self, request_id: str, num_total_computed_tokens: int
    ) -> None:
        """Room for tokens that a connector brings, behind the hits.

        Args:
            request_id: a request with `add_local_computed_blocks` just done.
            num_total_computed_tokens: local and external computed tokens.
        """
        if self.get_num_skipped_tokens(num_total_computed_tokens) >= (
            num_total_computed_tokens
        ):
            return  # none of them will be read
        row = self.req_to_blocks[request_id]
        missing = cdiv(num_total_computed_tokens, self.block_size) - len(row)
        if missing > 0:
            self._extend(row, missing)

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[int]:
        """Room for `num_tokens` tokens in all; the blocks that are new."""
        del num_tokens_main_model
        row = self.req_to_blocks.setdefault(request_id, [])
        missing = cdiv(num_tokens, self.block_size) - len(row)
        return self._extend(row, missing) if missing > 0 else []

    def _extend(self, row: list[int], n: int) -> list[int]:
        blocks = self.block_pool.get_new_blocks(n)
        row += blocks
        if self.settings.report_new_blocks:
            self._new_block_ids += blocks
        return blocks

    def _refuse_hits(self, request_id: str, blocks: Sequence[int]) -> None:
        if any(blocks):
            raise IntegrityError(
                f"request {request_id} cannot adopt cached blocks now: prefix caching "
                f"is off, or the request was admitted before"
            )

    # -- the life of a row ---------------------------------------------------------

    def cache_blocks(self, request: RequestLike, num_tokens: int) -> None:
        """Give the full blocks among the first `num_tokens` tokens their keys, as far
        as there are blocks.

        Raises:
            RequestError: the request has no hash for one of them.
        """
        row = self.req_to_blocks.get(request.request_id, ())
        start = self.num_cached_block.get(request.request_id, 0)
        stop = min(num_tokens // self.block_size, len(row))
        if start >= stop:
            return
        hashes = self._hashes_between(request, start, stop)
        blocks = self._cacheable(request.request_id, start, stop)
        parent = self._hashes_between(request, start - 1, start)[0] if start else None
        given = self.block_pool.cache_run(
            blocks,
            hashes,
            parent,
            start,
            self.kv_cache_group_id,
            context_of(request),
            fresh=request.request_id not in self._rewound,
        )
        self.num_cached_block[request.request_id] = stop
        self._cached(request, start, stop, hashes, given, parent)

    def _hashes_between(
        self, request: RequestLike, start: int, stop: int
    ) -> Sequence[bytes]:
        hashes = self.coarse_hashes(request.block_hashes)[start:stop]
        if len(hashes) < stop - start:
            raise RequestError(
                f"request {request.request_id} has too few block hashes "
                f"({len(request.block_hashes)}) to cache {stop} blocks of "
                f"{self.block_size} tokens"
            )
        return hashes

    def _cacheable(self, request_id: str, start: int, stop: int) -> list[int]:
        """Blocks [start, stop) of the row, null where no key is wanted."""
        return self.req_to_blocks[request_id][start:stop]

    def _cached(
        self,
        request: RequestLike,
        start: int,
        stop: int,
        hashes: Sequence[bytes],
        given: Sequence[int],
        parent: bytes | None,
    ) -> None:
        """Blocks [start, stop) were passed to the pool; `given` are the positions that
        got a key."""
        if given and self.settings.token_check is not None:
            row = self.req_to_blocks[request.request_id]
            self.settings.token_check.record(
                request,
                [(row[start + i], (start + i + 1) * self.block_size) for i in given],
            )
        if given and self.block_pool.events_enabled:
            self.block_pool.report(
                stored_event(self, request, start, stop, given, hashes, parent)
            )
        listener = self.block_pool.listener
        if given and listener is not None:
            listener.keys_given(
                request,
                self.kv_cache_group_id,
                self.block_size,
                start,
                hashes,
                given,
                parent,
            )

    def rewind(self, request_id: str, num_computed_tokens: int) -> None:
        """The request went back: blocks behind `num_computed_tokens` are written
        again, and those that lost their key are given it again when they are full.

        Raises:
            RequestError: blocks that it will read or write were given back.
        """
        self._refuse_missing_blocks(request_id, num_computed_tokens)
        kept = num_computed_tokens // self.block_size
        if kept < self.num_cached_block.get(request_id, 0):
            self.num_cached_block[request_id] = kept
            self._rewound.add(request_id)

    def _refuse_missing_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        first = self._num_skipped_blocks(num_computed_tokens)
        row = self.req_to_blocks.get(request_id, ())
        if NULL_BLOCK in row[first:]:
            raise RequestError(
                f"request {request_id} goes back to {num_computed_tokens} tokens, and "
                f"its {self.kind} group has given back blocks that it needs there: "
                f"free the request and admit it again"
            )

    def remove_skipped_blocks(
        self, request_id: str, total_computed_tokens: int
    ) -> None:
        """Give back the blocks that no later token attends to."""
        skipped = self._num_skipped_blocks(total_computed_tokens)
        row = self.req_to_blocks.get(request_id)
        if not skipped or not row:
            return
        removed = []
        for i in range(min(skipped, len(row)) - 1, -1, -1):
            if row[i] == NULL_BLOCK:
                break
            removed.append(row[i])
            row[i] = NULL_BLOCK
        if removed:
            self.block_pool.free_blocks(removed)

    def free(self, request_id: str) -> None:
        """Give back all blocks, the last ones to be evicted first. A request without
        blocks is fine."""
        self.num_cached_block.pop(request_id, None)
        self._rewound.discard(request_id)
        row = self.req_to_blocks.pop(request_id, None)
        if row:
            self.block_pool.free_blocks(row[::-1])

    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:
        """Leading blocks that every request with blocks shares."""
        del running_request_id
        return 0

    def new_step_starts(self) -> None:  # noqa: B027  # most types need no step
        """The engine begins a step."""

    def take_new_block_ids(self) -> list[int]:
        """Blocks allocated since the last call, if the group reports them."""
        ids, self._new_block_ids = self._new_block_ids, []
        return ids

    def check(self) -> None:
        """Verify the rows against the pool.

        Raises:
            IntegrityError: naming the invariant that does not hold.
        """
        for request_id, row in self.req_to_blocks.items():
            if any(block and not self.block_pool.ref_count(block) for block in row):
                raise IntegrityError(f"request {request_id} holds a free block")
            if self.num_cached_block.get(request_id, 0) > len(row):
                raise IntegrityError(f"request {request_id} cached more than it has")
