"""KVCacheManager: the scheduler's one entrance to the KV cache.

Names, signatures and results are those of vLLM 0.19.1 (`v1/core/kv_cache_manager.py`);
`parity.py` lists where the behaviour is better on purpose. A step of an engine:

    new_step_starts()
    running request:   allocate_slots(request, n)            None: preempt somebody
    waiting request:   blocks, hit = get_computed_blocks(request)
                       can_fit_full_sequence(request, hit, blocks)
                       allocate_slots(request, n, hit, blocks)
    finished request:  free(request)

Most calls of `allocate_slots` are for a running request that still has room in its last
block. For each request the manager knows up to which length that holds (`_quiet`), and
such a call returns at once.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from kvplugin.assembly import make_coordinator, make_pool
from kvplugin.coordinator import Rows
from kvplugin.errors import ConfigError
from kvplugin.events import KVCacheEvent
from kvplugin.explain import LookupExplanation, LookupHistory, explain_lookup
from kvplugin.hashing import HashFormat
from kvplugin.hooks import CheckpointContext, FreedContext, Hooks, get_hooks
from kvplugin.kv_cache_blocks import KVCacheBlocks
from kvplugin.managers import MambaManager, ManagerSettings
from kvplugin.parity import NO_PARITY, Parity
from kvplugin.policies.eviction import context_of
from kvplugin.request import RequestError, RequestLike
from kvplugin.residency import ResidencySampler
from kvplugin.spec import EngineLimits, KVCacheConfig
from kvplugin.stats import PrefixCacheStats
from kvplugin.token_check import TokenCheck


class KVCacheManager:
    """Blocks of all requests, in all groups.

    Args:
        kv_cache_config: the groups and the number of blocks.
        max_model_len: most tokens of a request.
        hash_block_size: tokens that one of a request's block hashes covers; every
            group's block size is a multiple.
        enable_caching: whether full blocks can be hit by later requests.
        use_eagle: whether a draft model needs the last cached tokens again.
        log_stats: count lookups for `make_prefix_cache_stats`.
        enable_kv_cache_events: collect events for `take_events`.
        dcp_world_size: ranks of decode context parallelism.
        pcp_world_size: ranks of prefill context parallelism.
        metrics_collector: follows sampled blocks from allocation to eviction.
        limits: what memory was sized by: how long requests and steps are. With it
            admission knows that windows, chunks and states recycle their blocks;
            without, it bills them at full length.
        hash_format: how the requests' hashes were made, where that matters here: how
            hashes of longer blocks come about, and whether hits need proof.
        eviction_policy: name of the policy that ranks cached blocks; LRU if empty.
        eviction_policy_options: what the policy is told.
        hooks: the plugins to ask; those installed if None.
        parity: behaviours of vLLM 0.19.1 to keep.
        lookup_history: lets `explain_lookup` tell evictions and other identities from
            what was never cached; of this manager only.

    Raises:
        ConfigError: the groups cannot work as configured.
        PluginError: a plugin's factory failed.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        max_model_len: int,
        hash_block_size: int,
        enable_caching: bool = True,
        use_eagle: bool = False,
        log_stats: bool = False,
        enable_kv_cache_events: bool = False,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
        metrics_collector: ResidencySampler | None = None,
        *,
        limits: EngineLimits | None = None,
        hash_format: HashFormat | None = None,
        eviction_policy: str = "",
        eviction_policy_options: Mapping[str, object] | None = None,
        hooks: Hooks | None = None,
        parity: Parity = NO_PARITY,
        lookup_history: LookupHistory | None = None,
    ) -> None:
        for name, size in (
            ("max_model_len", max_model_len),
            ("hash_block_size", hash_block_size),
            ("dcp_world_size", dcp_world_size),
            ("pcp_world_size", pcp_world_size),
        ):
            if size < 1:
                raise ConfigError(f"{name} must be at least 1, got {size}")
        context_parallel_size = dcp_world_size * pcp_world_size
        if limits is not None:
            for name, ours, theirs in (
                ("max_model_len", max_model_len, limits.max_model_len),
                (
                    "context parallel size",
                    context_parallel_size,
                    limits.context_parallel_size,
                ),
            ):
                if ours != theirs:
                    raise ConfigError(f"{name} is {ours}, in limits it is {theirs}")
        self.kv_cache_config = kv_cache_config
        self.hash_block_size = hash_block_size
        self.max_model_len = max_model_len
        self.enable_caching = enable_caching
        self.use_eagle = use_eagle
        self.log_stats = log_stats
        self.parity = parity
        self.num_kv_cache_groups = len(kv_cache_config.kv_cache_groups)
        self.prefix_cache_stats = PrefixCacheStats() if log_stats else None
        self._hooks = get_hooks() if hooks is None else hooks
        settings = ManagerSettings(
            enable_caching=enable_caching,
            hash_block_size=hash_block_size,
            coarse_rule="last" if hash_format is None else hash_format.coarse_rule,
            limits=limits,
            context_parallel_size=context_parallel_size,
            report_new_blocks=kv_cache_config.needs_kv_cache_zeroing,
            parity=parity,
        )
        self.block_pool = make_pool(
            self._hooks,
            kv_cache_config,
            settings,
            eviction_policy=eviction_policy,
            eviction_policy_options=eviction_policy_options or {},
            enable_events=enable_kv_cache_events,
            residency=metrics_collector,
        )
        self.lookup_history = self.block_pool.listener = lookup_history
        self._token_check = None
        if hash_format is not None and hash_format.needs_token_check:
            self._token_check = TokenCheck(self.block_pool, hash_block_size)
            settings = replace(settings, token_check=self._token_check)
        self.coordinator = make_coordinator(
            self._hooks,
            kv_cache_config,
            self.block_pool,
            settings,
            max_model_len=max_model_len,
            use_eagle=use_eagle,
        )
        self.empty_kv_cache_blocks = KVCacheBlocks(
            self.block_pool, tuple(() for _ in range(self.num_kv_cache_groups))
        )
        """The one instance for "no blocks in any group": compare by identity."""
        # Of admitted requests the length up to which nothing has to be done.
        self._quiet: dict[str, int] = {}
        # Requests alive when keys were taken away: they may compute blocks again.
        self._rewindable: set[str] = set()

    @property
    def hooks(self) -> Hooks:
        """The plugins that it asks."""
        return self._hooks

    # -- lookup and admission ------------------------------------------------------

    def get_computed_blocks(self, request: RequestLike) -> tuple[KVCacheBlocks, int]:
        """The cached blocks that the request can start from, and their tokens.

        At most all tokens but the last, which is needed for the logits; whole blocks
        only. Counts as a lookup in the statistics: a scheduler that asks again at each
        step uses `find_computed_blocks`, and `record_prefix_cache_stats` once.

        Raises:
            RequestError: the request was hashed in blocks of another size.
        """
        blocks, hit = self.find_computed_blocks(request)
        if self.enable_caching and not request.skip_reading_prefix_cache:
            self.record_prefix_cache_stats(request, hit)
        return blocks, hit

    def find_computed_blocks(self, request: RequestLike) -> tuple[KVCacheBlocks, int]:
        """`get_computed_blocks` that changes nothing at all."""
        if not self.enable_caching or request.skip_reading_prefix_cache:
            return self.empty_kv_cache_blocks, 0
        if len(request.block_hashes) * self.hash_block_size > request.num_tokens:
            raise RequestError(
                f"request {request.request_id} has {len(request.block_hashes)} block "
                f"hashes for {request.num_tokens} tokens: hash it with blocks of "
                f"{self.hash_block_size} tokens, the manager's hash_block_size"
            )
        rows, hit = self._find_hit(request)
        return self.create_kv_cache_blocks(rows), hit

    def record_prefix_cache_stats(self, request: RequestLike, hit: int) -> None:
        """Count a lookup that found `hit` tokens, and tell why not more to whoever
        listens."""
        if self.prefix_cache_stats is not None:
            self.prefix_cache_stats.record(
                num_tokens=request.num_tokens,
                num_hits=hit,
                preempted=request.num_preemptions > 0,
            )
        if self._hooks.hears_lost_hit and hit < request.num_tokens:
            self._hooks.on_lost_hit(self.explain_lookup(request))

    def _find_hit(self, request: RequestLike) -> tuple[Rows, int]:
        rows, hit = self.coordinator.find_longest_cache_hit(
            request.block_hashes, request.num_tokens - 1
        )
        if self._token_check is not None and hit:
            return self._proven(self._token_check, request, rows, hit)
        return rows, hit

    def _proven(
        self, check: TokenCheck, request: RequestLike, rows: Rows, hit: int
    ) -> tuple[Rows, int]:
        """The longest hit whose blocks were computed for this very prefix."""
        sizes = [
            manager.block_size for manager in self.coordinator.single_type_managers
        ]
        while hit and (proven := check.proven_tokens(request, rows, sizes)) < hit:
            rows, hit = self.coordinator.find_longest_cache_hit(
                request.block_hashes, proven
            )
        return rows, hit

    def explain_lookup(self, request: RequestLike) -> LookupExplanation:
        """Why `get_computed_blocks` would hit no more now. Changes nothing.

        To be asked before the request is admitted: then its own blocks are cached.
        """
        return explain_lookup(
            self.coordinator,
            request,
            hit_tokens=self._find_hit(request)[1] if self.enable_caching else 0,
            enable_caching=self.enable_caching,
            history=self.lookup_history,
        )

    def can_fit_full_sequence(
        self,
        request: RequestLike,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_external_computed_tokens: int = 0,
        num_encoder_tokens: int = 0,
    ) -> bool:
        """Whether the free blocks suffice for all tokens that the request has now.

        Groups that give blocks back on the way (windows, chunks, states) are billed
        at their peak. Changes nothing.
        """
        hits = new_computed_blocks or self.empty_kv_cache_blocks
        local = request.num_computed_tokens + num_new_computed_tokens
        num_tokens = min(request.num_tokens, self.max_model_len)
        needed = self.coordinator.get_num_blocks_to_allocate(
            request_id=request.request_id,
            num_tokens=num_tokens,
            new_computed_blocks=hits.ids,
            num_encoder_tokens=num_encoder_tokens,
            total_computed_tokens=min(
                local + num_external_computed_tokens, self.max_model_len
            ),
            num_tokens_main_model=num_tokens,
            whole_request=not self.parity.admission_ignores_recycling,
        )
        return needed <= self.block_pool.get_num_free_blocks()

    def allocate_slots(
        self,
        request: RequestLike,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
    ) -> KVCacheBlocks | None:
        """Room for a request's next tokens.

        The tokens of a request, in order, as half-open intervals:

            0        computed       local hit      external hit     new     lookahead
            ├───────────┼───────────────┼────────────────┼───────────┼──────────┤
            had before  adopted here    room made here   room here   room here
                        keyed already   keyed now, or later if `delay_cache_blocks`
                                                         keyed now if final
                                                         (drafts are not)

        Leading blocks that no later token attends to are given back first, even if
        the rest then does not fit. Blocks get their key before the step that fills
        them: the next request of the same step may share them.

        Args:
            request: `num_computed_tokens` is its first boundary.
            num_new_tokens: tokens to compute, drafts to verify included.
            num_new_computed_tokens: tokens of the local hit.
            new_computed_blocks: its blocks, from `get_computed_blocks`.
            num_lookahead_tokens: slots for tokens that a draft model will propose.
            num_external_computed_tokens: tokens that a connector brings.
            delay_cache_blocks: give no keys yet (their bytes arrive later, see
                `cache_blocks`).
            num_encoder_tokens: tokens of the encoder, for cross-attention.

        Returns:
            The blocks that are new for tokens to compute and lookahead, or None if
            the free blocks do not suffice (nothing was taken then).

        Raises:
            ValueError: no new and no external tokens.
            RequestError: the request has no hash for a block to key, or went back
                behind blocks that were given back.
        """
        if (
            request.num_computed_tokens + num_new_tokens + num_lookahead_tokens
            <= self._quiet.get(request.request_id, -1)
            and new_computed_blocks is None
            and num_new_tokens > 0
            and not num_new_computed_tokens
            and not num_external_computed_tokens
            and not num_encoder_tokens
        ):
            return self.empty_kv_cache_blocks
        if num_new_tokens == 0 and num_external_computed_tokens == 0:
            raise ValueError(
                "num_new_tokens must be greater than 0 when there are no "
                "external computed tokens"
            )
        coordinator, request_id = self.coordinator, request.request_id
        hits = new_computed_blocks or self.empty_kv_cache_blocks
        local = request.num_computed_tokens + num_new_computed_tokens
        computed = local + num_external_computed_tokens
        total = min(computed, self.max_model_len)
        main = total + num_new_tokens
        slots = min(main + num_lookahead_tokens, self.max_model_len)

        if request_id in self._rewindable:
            coordinator.rewind(request_id, request.num_computed_tokens)
        settled = total - getattr(request, "num_in_flight_tokens", 0)
        coordinator.remove_skipped_blocks(request_id, settled)
        needed = coordinator.get_num_blocks_to_allocate(
            request_id, slots, hits.ids, num_encoder_tokens, computed, main
        )
        if needed > self.block_pool.get_num_free_blocks():
            return None
        if hits is not self.empty_kv_cache_blocks or num_external_computed_tokens:
            ctx = None if request.num_preemptions else context_of(request)
            coordinator.allocate_new_computed_blocks(
                request_id, hits.ids, local, num_external_computed_tokens, ctx
            )
        new = coordinator.allocate_new_blocks(
            request_id, slots, main, num_encoder_tokens
        )
        if self._hooks.chooses_checkpoints and request_id not in self._quiet:
            self._choose_checkpoints(request, total)
        if self.enable_caching and not delay_cache_blocks:
            coordinator.cache_blocks(request, min(main, slots, request.num_tokens))
        self._quiet[request_id] = coordinator.quiet_until(request_id, settled)
        return self.create_kv_cache_blocks(new)

    # -- the life of a request -----------------------------------------------------

    def _choose_checkpoints(self, request: RequestLike, num_computed: int) -> None:
        """Ask, once an admission, where state groups shall keep checkpoints."""
        for manager in self.coordinator.single_type_managers:
            if isinstance(manager, MambaManager):
                ctx = CheckpointContext(
                    request=request,
                    group=manager.kv_cache_group_id,
                    block_size=manager.block_size,
                    num_computed_tokens=num_computed,
                    max_tokens=self.max_model_len,
                )
                chosen = self._hooks.choose_checkpoints(ctx)
                manager.set_checkpoints(request.request_id, chosen)

    def cache_blocks(self, request: RequestLike, num_computed_tokens: int) -> None:
        """Give the full blocks among the first tokens their keys (bytes that a
        connector brought have arrived)."""
        if self.enable_caching:
            self.coordinator.cache_blocks(request, num_computed_tokens)

    def remove_skipped_blocks(
        self, request_id: str, total_computed_tokens: int
    ) -> None:
        """Give back the blocks that no token after the computed ones attends to."""
        self.coordinator.remove_skipped_blocks(request_id, total_computed_tokens)

    def free(self, request: RequestLike) -> None:
        """Give back all blocks; the last ones of each group will be evicted first."""
        self._quiet.pop(request.request_id, None)
        self._rewindable.discard(request.request_id)
        if self._token_check is not None:
            self._token_check.freed(request.request_id)
        if not self._hooks.hears_request_freed:
            self.coordinator.free(request.request_id)
            return
        rows = self.coordinator.get_blocks(request.request_id)
        num_blocks = tuple(map(len, rows))
        self.coordinator.free(request.request_id)
        if any(num_blocks):
            ctx = FreedContext(num_tokens=request.num_tokens, num_blocks=num_blocks)
            self._hooks.on_request_freed(request.request_id, ctx)

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Take blocks out of the prefix cache because their bytes are wrong.

        They stay with their requests. A request that then goes back
        (`num_computed_tokens` is lowered) and computes them again gives them their
        keys again. Groups that have given back blocks which it would read or write
        (windows, chunks, states) do not let it: free such a request and admit it
        again.
        """
        self.block_pool.evict_blocks(block_ids)
        self._rewindable.update(self._quiet)
        self._quiet = dict.fromkeys(self._quiet, -1)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks, for instance after a change of weights.

        Returns:
            False, with nothing changed, while blocks are in use.
        """
        if not self.block_pool.reset_prefix_cache():
            return False
        if self.prefix_cache_stats is not None:
            self.prefix_cache_stats.reset = True
        return True

    def new_step_starts(self) -> None:
        """The engine begins a step."""
        self.coordinator.new_step_starts()

    # -- questions -----------------------------------------------------------------

    @property
    def usage(self) -> float:
        """Share of the blocks in use, 0 to 1."""
        return self.block_pool.get_usage()

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """All blocks of a request."""
        return self.create_kv_cache_blocks(self.coordinator.get_blocks(request_id))

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Ids of all blocks of a request, a new list a group."""
        return tuple(map(list, self.coordinator.get_blocks(request_id)))

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """Of each group the leading blocks that every request with blocks shares
        (0 where an idle request does not share them)."""
        return self.coordinator.get_num_common_prefix_blocks(running_request_id)

    def create_kv_cache_blocks(self, ids: tuple[Sequence[int], ...]) -> KVCacheBlocks:
        """These blocks, or the shared empty instance if there are none."""
        if any(ids):
            return KVCacheBlocks(self.block_pool, ids)
        return self.empty_kv_cache_blocks

    def check(self, pinned: Iterable[int] = ()) -> None:
        """Verify every invariant of pool, managers and references.

        Args:
            pinned: blocks referenced by others than requests, one entry a reference.

        Raises:
            IntegrityError: naming the invariant that does not hold.
        """
        self.coordinator.check(pinned)

    # -- reports -------------------------------------------------------------------

    def make_prefix_cache_stats(self) -> PrefixCacheStats | None:
        """Lookups since the last call; None without `log_stats`."""
        stats = self.prefix_cache_stats
        if stats is not None:
            self.prefix_cache_stats = PrefixCacheStats()
        return stats

    def take_events(self) -> list[KVCacheEvent]:
        """KV events since the last call, oldest first."""
        events = self.block_pool.take_events()
        if events and self._hooks.hears_events:
            self._hooks.on_events(events)
        return events

    def take_new_block_ids(self) -> list[int]:
        """Blocks allocated since the last call that must be zeroed before use."""
        return [
            block
            for manager in self.coordinator.single_type_managers
            for block in manager.take_new_block_ids()
        ]
