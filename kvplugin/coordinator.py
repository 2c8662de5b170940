"""Coordinators: the managers of all groups behind one pool, answering as one.

Which hit a request gets is where groups must agree, and the three coordinators differ
in nothing else: without prefix cache there is none; with one group it is that group's;
with several it is the longest length that every group accepts, found by a fixed point:
each group in turn shortens the candidate until all keep it. Lengths only fall, so it
ends.

A draft model (EAGLE, MTP) must see the last cached tokens again: the block behind the
hit must be cached too. That is a condition on a length and not a drop, so asking twice
costs nothing, and all groups together lose one alignment unit at most.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import lcm

from kvplugin.block import NULL_BLOCK
from kvplugin.block_pool import BlockPool
from kvplugin.errors import ConfigError, IntegrityError
from kvplugin.managers import NEVER, SingleTypeKVCacheManager
from kvplugin.parity import NO_PARITY, Parity
from kvplugin.policies.eviction import NO_CONTEXT, BlockContext
from kvplugin.request import RequestLike

Rows = tuple[list[int], ...]
"""Block ids, a list a group."""


class KVCacheCoordinator(ABC):
    """Fans every call out to the managers, in the order of their groups.

    Args:
        block_pool: the pool of all groups.
        managers: one a group.
        use_eagle: whether a draft model needs the last cached tokens again.
        parity: behaviours of vLLM 0.19.1 to keep.
    """

    def __init__(
        self,
        block_pool: BlockPool,
        managers: Sequence[SingleTypeKVCacheManager],
        *,
        use_eagle: bool = False,
        parity: Parity = NO_PARITY,
    ) -> None:
        self.block_pool = block_pool
        self.single_type_managers = tuple(managers)
        self.use_eagle = use_eagle
        self.parity = parity

    # -- lookup --------------------------------------------------------------------

    @abstractmethod
    def find_longest_cache_hit(
        self, block_hashes: Sequence[bytes], max_cache_hit_length: int
    ) -> tuple[Rows, int]:
        """The longest prefix that every group can start from.

        Args:
            block_hashes: the request's hashes, one every `hash_block_size` tokens.
            max_cache_hit_length: most tokens of the hit.

        Returns:
            New lists of cached blocks, one a group, null where a group will not read,
            and the number of tokens. Nothing is adopted yet.
        """

    # -- allocation ----------------------------------------------------------------

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[Sequence[int]],
        num_encoder_tokens: int,
        total_computed_tokens: int,
        num_tokens_main_model: int,
        whole_request: bool = False,
    ) -> int:
        """Free blocks that all groups together will take, see the managers' method."""
        needed = 0
        for manager, hits in zip(
            self.single_type_managers, new_computed_blocks, strict=True
        ):
            if manager.sized_by_encoder_tokens:
                needed += manager.get_num_blocks_to_allocate(
                    request_id, num_encoder_tokens, (), 0, num_encoder_tokens
                )
            else:
                needed += manager.get_num_blocks_to_allocate(
                    request_id,
                    num_tokens,
                    hits,
                    total_computed_tokens,
                    num_tokens_main_model,
                    whole_request,
                )
        return needed

    def allocate_new_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[Sequence[int]],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
        ctx: BlockContext | None = NO_CONTEXT,
    ) -> None:
        """Adopt the hits of all groups, then find room for external tokens.

        In two phases, because room may come from evicting cached blocks: hits of a
        later group must be in use by then.
        """
        total = num_local_computed_tokens + num_external_computed_tokens
        fresh = []
        for manager, hits in zip(
            self.single_type_managers, new_computed_blocks, strict=True
        ):
            is_new = request_id not in manager.num_cached_block
            manager.add_local_computed_blocks(
                request_id,
                hits,
                num_local_computed_tokens,
                num_external_computed_tokens,
                ctx,
            )
            if not is_new or not num_external_computed_tokens:
                continue
            if self.parity.external_blocks_by_group:
                manager.allocate_external_computed_blocks(request_id, total)
            else:
                fresh.append(manager)
        for manager in fresh:
            manager.allocate_external_computed_blocks(request_id, total)

    def allocate_new_blocks(
        self,
        request_id: str,
        num_tokens: int,
        num_tokens_main_model: int,
        num_encoder_tokens: int = 0,
    ) -> Rows:
        """Room for `num_tokens` tokens in all; the new entries of each row."""
        return tuple(
            [
                manager.allocate_new_blocks(
                    request_id,
                    num_encoder_tokens
                    if manager.sized_by_encoder_tokens
                    else num_tokens,
                    num_tokens_main_model,
                )
                for manager in self.single_type_managers
            ]
        )

    # -- the life of a request -----------------------------------------------------

    def cache_blocks(self, request: RequestLike, num_computed_tokens: int) -> None:
        """Give the full blocks among the first tokens their keys."""
        for manager in self.single_type_managers:
            manager.cache_blocks(request, num_computed_tokens)

    def rewind(self, request_id: str, num_computed_tokens: int) -> None:
        """Blocks behind `num_computed_tokens` are going to be written again."""
        for manager in self.single_type_managers:
            manager.rewind(request_id, num_computed_tokens)

    def remove_skipped_blocks(
        self, request_id: str, total_computed_tokens: int
    ) -> None:
        """Give back the blocks that no later token attends to."""
        for manager in self.single_type_managers:
            manager.remove_skipped_blocks(request_id, total_computed_tokens)

    def quiet_until(self, request_id: str, total_computed_tokens: int) -> int:
        """Up to which length an admitted request needs nothing from any group."""
        limit = NEVER
        for manager in self.single_type_managers:
            limit = min(limit, manager.quiet_until(request_id, total_computed_tokens))
        return limit

    def free(self, request_id: str) -> None:
        """Give back all blocks of a request."""
        for manager in self.single_type_managers:
            manager.free(request_id)

    def get_blocks(self, request_id: str) -> Rows:
        """The request's rows (not copies), empty where it has none."""
        return tuple(
            [
                manager.req_to_blocks.get(request_id) or []
                for manager in self.single_type_managers
            ]
        )

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """Leading blocks of each group that every request with blocks shares."""
        return [
            manager.get_num_common_prefix_blocks(running_request_id)
            for manager in self.single_type_managers
        ]

    def new_step_starts(self) -> None:
        """The engine begins a step."""
        for manager in self.single_type_managers:
            manager.new_step_starts()

    def check(self, pinned: Iterable[int] = ()) -> None:
        """Verify pool, managers, and that references are what rows hold.

        Args:
            pinned: blocks referenced by others than requests, one entry a reference.

        Raises:
            IntegrityError: naming the invariant that does not hold.
        """
        self.block_pool.check()
        held = Counter(pinned)
        for manager in self.single_type_managers:
            manager.check()
            for row in manager.req_to_blocks.values():
                held.update(row)
        held.update(self.block_pool.reserved_blocks)
        del held[NULL_BLOCK]
        for block in range(1, self.block_pool.num_blocks):
            if self.block_pool.ref_count(block) != held[block]:
                raise IntegrityError(
                    f"block {block} has {self.block_pool.ref_count(block)} references, "
                    f"{held[block]} are known"
                )


class KVCacheCoordinatorNoPrefixCache(KVCacheCoordinator):
    """Any number of groups, none included, and no hits."""

    def find_longest_cache_hit(
        self, block_hashes: Sequence[bytes], max_cache_hit_length: int
    ) -> tuple[Rows, int]:
        """Nothing."""
        del block_hashes, max_cache_hit_length
        return tuple([] for _ in self.single_type_managers), 0

    def cache_blocks(self, request: RequestLike, num_computed_tokens: int) -> None:
        """Nothing is cached."""

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """Nothing is shared."""
        del running_request_id
        return [0] * len(self.single_type_managers)


class UnitaryKVCacheCoordinator(KVCacheCoordinator):
    """One group: its hit is the hit.

    Raises:
        ConfigError: the group cannot be looked up as configured.
    """

    def __init__(
        self,
        block_pool: BlockPool,
        managers: Sequence[SingleTypeKVCacheManager],
        *,
        use_eagle: bool = False,
        parity: Parity = NO_PARITY,
    ) -> None:
        super().__init__(block_pool, managers, use_eagle=use_eagle, parity=parity)
        self.find_longest_cache_hit((), 0)  # what is refused is refused now

    def find_longest_cache_hit(
        self, block_hashes: Sequence[bytes], max_cache_hit_length: int
    ) -> tuple[Rows, int]:
        manager = self.single_type_managers[0]
        rows = manager.find_longest_cache_hit(
            manager.coarse_hashes(block_hashes),
            max_cache_hit_length,
            (0,),
            manager.block_size,
            self.use_eagle,
        )
        return rows, len(rows[0]) * manager.block_size


@dataclass(frozen=True, slots=True)
class _AttentionGroup:
    """Groups of equal spec, which are looked up together."""

    manager: SingleTypeKVCacheManager
    group_ids: list[int]


class HybridKVCacheCoordinator(KVCacheCoordinator):
    """Several groups: the longest length that all of them accept.

    Raises:
        ConfigError: context parallelism, which groups of one kind only can do, or
            groups that cannot be looked up together as configured.
    """

    def __init__(
        self,
        block_pool: BlockPool,
        managers: Sequence[SingleTypeKVCacheManager],
        *,
        use_eagle: bool = False,
        parity: Parity = NO_PARITY,
    ) -> None:
        super().__init__(block_pool, managers, use_eagle=use_eagle, parity=parity)
        for manager in managers:
            if manager.settings.context_parallel_size > 1:
                raise ConfigError(
                    "context parallelism does not work with several KV cache groups: "
                    "set decode and prefill context parallel size to 1, got "
                    f"{manager.settings.context_parallel_size}"
                )
        self.attention_groups = _by_spec(self.single_type_managers)
        self.alignment_tokens = lcm(*(manager.block_size for manager in managers))
        """Every hit is a multiple of this many tokens."""
        self.find_longest_cache_hit((), 0)  # what is refused is refused now

    def find_longest_cache_hit(
        self, block_hashes: Sequence[bytes], max_cache_hit_length: int
    ) -> tuple[Rows, int]:
        if self.use_eagle and self.parity.draft_drop_per_lookup:
            return self._v019_hit(block_hashes, max_cache_hit_length)
        rows: dict[int, list[int]] = {}
        lengths = [-1] * len(self.attention_groups)
        length, before = max_cache_hit_length, -1
        while length != before:
            before = length
            for i, group in enumerate(self.attention_groups):
                if lengths[i] == length:
                    continue
                if lengths[i] > length and group.manager.hits_are_downward_closed:
                    length -= length % group.manager.block_size
                else:
                    length = self._look_up(group, block_hashes, length, rows)
                lengths[i] = length
        return self._cut(rows, length), length

    def _v019_hit(
        self, block_hashes: Sequence[bytes], max_length: int
    ) -> tuple[Rows, int]:
        """The fixed point of 0.19.1, which drops a block in every lookup."""
        rows: dict[int, list[int]] = {}
        first = self.attention_groups[0].manager
        simple = len(self.attention_groups) == 2 and first.hits_are_downward_closed
        length = max_length
        while True:
            candidate = length
            for group in self.attention_groups:
                closed = group.manager.hits_are_downward_closed
                if closed and group.group_ids[0] in rows:
                    candidate -= candidate % group.manager.block_size
                else:
                    candidate = self._look_up(group, block_hashes, candidate, rows)
            if candidate >= length:
                break
            length = candidate
            if simple:
                break
        return self._cut(rows, length), length

    def _look_up(
        self,
        group: _AttentionGroup,
        block_hashes: Sequence[bytes],
        max_length: int,
        rows: dict[int, list[int]],
    ) -> int:
        """Put the group's hit into `rows`; its length in tokens."""
        manager = group.manager
        hits = manager.find_longest_cache_hit(
            manager.coarse_hashes(block_hashes),
            max_length,
            group.group_ids,
            self.alignment_tokens,
            self.use_eagle,
        )
        rows.update(zip(group.group_ids, hits, strict=True))
        return len(hits[0]) * manager.block_size

    def _cut(self, rows: dict[int, list[int]], length: int) -> Rows:
        """Rows in the order of groups, dense ones cut to the agreed length."""
        for group in self.attention_groups:
            if group.manager.hits_are_downward_closed:
                for i in group.group_ids:
                    del rows[i][length // group.manager.block_size :]
        return tuple(rows[i] for i in range(len(self.single_type_managers)))


def _by_spec(managers: Sequence[SingleTypeKVCacheManager]) -> list[_AttentionGroup]:
    """Groups of equal spec together, dense ones first: their scan from the left gives
    the others a tight bound."""
    found: list[_AttentionGroup] = []
    for i, manager in enumerate(managers):
        for group in found:
            if group.manager.kv_cache_spec == manager.kv_cache_spec:
                group.group_ids.append(i)
                break
        else:
            found.append(_AttentionGroup(manager, [i]))
    return sorted(found, key=lambda group: not group.manager.hits_are_downward_closed)


def make_coordinator(
    block_pool: BlockPool,
    managers: Sequence[SingleTypeKVCacheManager],
    *,
    enable_caching: bool,
    use_eagle: bool = False,
    parity: Parity = NO_PARITY,
) -> KVCacheCoordinator:
    """The coordinator for these groups.

    Raises:
        ConfigError: the groups cannot work together as configured.
    """
    kind: type[KVCacheCoordinator]
    if not enable_caching or not managers:
        kind = KVCacheCoordinatorNoPrefixCache
    elif len(managers) == 1:
        kind = UnitaryKVCacheCoordinator
    else:
        kind = HybridKVCacheCoordinator
    return kind(block_pool, managers, use_eagle=use_eagle, parity=parity)
