"""The engine: a scheduler, its workers, and the users of both."""

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from msgspec import structs

from kvplugin.contract import ModelIdentity, SchedulerHalf, WorkerHalf
from kvplugin.errors import IntegrityError
from kvplugin.hashing import DEFAULT_FORMAT, HashFormat, get_hash_format
from kvplugin.hooks import Hooks
from kvplugin.integration.reference.arrivals import check_drafter, check_tokens
from kvplugin.integration.reference.config import EngineConfig, SamplingParams
from kvplugin.integration.reference.connector import (
    Connector,
    engine_info,
    introduce,
    register,
)
from kvplugin.integration.reference.layers import Memory
from kvplugin.integration.reference.memory import (
    MemoryPlan,
    cache_settings,
    plan_memory,
)
from kvplugin.integration.reference.model import Model
from kvplugin.integration.reference.ranks import Drafter, Ranks, User
from kvplugin.integration.reference.runner import Runner
from kvplugin.integration.reference.sampling import Sampler
from kvplugin.manager import KVCacheManager
from kvplugin.managers import SinkFullAttentionManager
from kvplugin.request import Request, RequestError
from kvplugin.scheduler import (
    ModelOutput,
    RequestOutput,
    Scheduler,
    SchedulerOutput,
)

if TYPE_CHECKING:
    from kvplugin.integration.reference.content import ContentWatch

_PATIENCE: Final = 10_000
"""Steps without news after which `run` gives up: an engine that stands still. With a
connector they must also have taken longer than a load may."""
_PAUSE: Final = 0.0005
"""Seconds between steps that bring no news while a connector may be at work."""


@dataclass
class Answer:
    """What has come of a request so far."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    num_cached_tokens: int = 0
    """Tokens that its first admission did not have to compute."""
    kv_transfer_params: Mapping[str, Any] | None = None
    """What its connector hands over to the engine that goes on with it."""
    logits: dict[int, torch.Tensor] = field(default_factory=dict)
    """With `record_logits`: position of a sampled token -> its logits."""

    @property
    def log_probs(self) -> list[float]:
        """Of its tokens, as far as their logits were recorded."""
        positions = sorted(self.logits)[: len(self.token_ids)]
        pairs = zip(self.token_ids, positions, strict=False)
        return [float(self.logits[at].log_softmax(-1)[token]) for token, at in pairs]


class ReferenceEngine:
    """Serves a model from paged KV.

    Args:
        model: what to serve.
        config: how.
        connector: brings and takes KV, if there is one.
        drafter: proposes tokens, if there is one.
        plugins: the hooks to ask; those installed if None.
        clock: seconds, for the deadlines of loads.
        content: sees whose bytes are written and read, for tests.

    Raises:
        ConfigError: model and settings do not go together.
        CapacityError: a request of `max_model_len` does not fit the pool.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        connector: Connector | None = None,
        *,
        drafter: Drafter | None = None,
        plugins: Hooks | None = None,
        clock: Callable[[], float] = time.monotonic,
        content: "ContentWatch | None" = None,
    ) -> None:
        check_drafter(drafter, config)
        ranks = range(config.tensor_parallel_size)
        extra = [() if drafter is None else drafter.mixers(rank) for rank in ranks]
        self.config = config = _with_lookahead(config) if extra[0] else config
        settings = cache_settings(config)
        parts = [model.rank(settings, rank, len(ranks)) for rank in ranks]
        self.plan = plan_memory(
            [[*part.mixers, *more] for part, more in zip(parts, extra, strict=True)],
            config,
            draft_layers=frozenset(mixer.name for mixer in extra[0]),
            wishes=() if connector is None else connector.wishes,
        )
        self.manager = _make_manager(self.plan, config, bool(extra[0]), plugins)
        sinks = _sink_blocks(self.manager)
        make_runner: Callable[..., Runner] = Runner
        if content is not None:
            content.bind(self.manager.block_pool, self._request)
            make_runner = content.make_runner
        self.ranks = Ranks(
            [
                make_runner(
                    parts[rank],
                    self.plan,
                    rank,
                    max_num_seqs=config.scheduler.max_num_seqs,
                    sink_blocks=sinks,
                    extra=extra[rank],
                    device=config.device,
                )
                for rank in ranks
            ],
            drafter,
        )
        self.scheduler_half, self.worker_halves = self._connect(connector)
        self.scheduler = Scheduler(
            self.manager,
            config.scheduler,
            connector=self.scheduler_half,
            num_ranks=len(ranks),
            clock=clock,
            hooks=plugins,
        )
        self.answers: dict[str, Answer] = {}
        """Of all requests, by id."""
        self._users: dict[str, User] = {}
        self._in_flight: deque[ModelOutput] = deque()
        self._num_requests = 0

    def _connect(
        self, connector: Connector | None
    ) -> tuple[SchedulerHalf | None, list[WorkerHalf]]:
        if connector is None:
            return None, []
        infos = [
            engine_info(
                runner.config,
                runner.tensors,
                hash_block_size=self.plan.hash_block_size,
                rank=rank,
                world_size=len(self.ranks.runners),
                max_model_len=self.config.max_model_len,
                max_step_tokens=self.config.scheduler.max_num_batched_tokens,
                model=self.identity,
                prefix_caching=self.config.enable_prefix_caching,
                engine_id=self.config.engine_id,
            )
            for rank, runner in enumerate(self.ranks.runners)
        ]
        workers = [connector.make_worker_half(info) for info in infos]
        for worker, runner in zip(workers, self.ranks.runners, strict=True):
            register(worker, runner.tensors, runner.model.config)
        half = connector.make_scheduler_half(infos[0])
        introduce(half, workers)
        return half, workers

    @property
    def identity(self) -> ModelIdentity:
        """Whose KV it is."""
        return ModelIdentity(
            name=self.config.model_name,
            dtype=self.ranks.models[0].config.dtype,
            backends=tuple(sorted({b.name for b in self.plan.backends.values()})),
            hash_algorithm=DEFAULT_FORMAT,
        )

    # -- requests ------------------------------------------------------------------

    def add_request(
        self,
        prompt: Sequence[int],
        params: SamplingParams = SamplingParams(),  # noqa: B008
        *,
        req_id: str | None = None,
        encoder_token_ids: Sequence[int] = (),
        cache_salt: str | None = None,
        priority: int = 0,
        kv_transfer_params: Mapping[str, Any] | None = None,
    ) -> str:
        """A request arrives; its id.

        Args:
            prompt: token ids.
            params: what is asked for.
            req_id: not in use; None makes one.
            encoder_token_ids: for cross-attention.
            cache_salt: requests of other salts share no KV with it.
            priority: lower goes first, under the priority policy.
            kv_transfer_params: what its client says to connectors that exchange KV
                with other engines.

        Raises:
            RequestError: it can never be served, or its id is in use.
        """
        self._num_requests += 1
        req_id = f"request-{self._num_requests}" if req_id is None else req_id
        if req_id in self._users:  # its end may not have been heard yet
            raise RequestError(f"request id {req_id!r} is in use")
        check_tokens(
            req_id,
            prompt,
            encoder_token_ids,
            self.ranks.models[0].config,
            self.config.max_num_encoder_input_tokens,
        )
        request = Request(
            req_id,
            prompt,
            hash_format=self._hash_format,
            hash_block_size=self.plan.hash_block_size,
            cache_salt=cache_salt,
            priority=priority,
            arrival_time=float(self._num_requests),
            kv_transfer_params=kv_transfer_params,
        )
        self.scheduler.add_request(
            request,
            params.max_tokens,
            stop_token_ids=params.stop_token_ids,
            num_encoder_tokens=len(encoder_token_ids),
        )
        seed = self.config.seed if params.seed is None else params.seed
        sampler = Sampler(params.temperature, seed)
        num_prompt = request.num_prompt_tokens  # the connector may have shortened it
        self._users[req_id] = User(sampler, num_prompt, tuple(encoder_token_ids))
        self.answers[req_id] = Answer()
        return req_id

    def _request(self, req_id: str) -> Request:
        return self.scheduler.requests[req_id].request

    @property
    def _hash_format(self) -> HashFormat | None:
        # A connector finds KV by hashes, whether the engine's own cache does or not;
        # but a layer without memory has to see the whole prompt in one step.
        mixers = self.ranks.models[0].mixers
        whole = any(mixer.memory is Memory.NOTHING for mixer in mixers)
        connected = self.scheduler_half is not None and not whole
        needed = self.config.enable_prefix_caching or connected
        return get_hash_format(DEFAULT_FORMAT) if needed else None

    def abort(self, req_id: str) -> None:
        """Nobody wants the request any more; an unknown one is fine."""
        self.scheduler.abort_request(req_id)

    def has_work(self) -> bool:
        """Whether further steps are needed."""
        return bool(self._in_flight) or self.scheduler.has_work()

    def step(self) -> list[RequestOutput]:
        """Schedule and compute a step, and take in what came of the oldest in flight.

        Steps are computed at once; with `pipeline_depth=2` their results are heard one
        step later, as they are of a device.
        """
        output = self.scheduler.schedule()
        self._in_flight.append(self._execute(output))
        depth = (
            self.config.scheduler.pipeline_depth if output.num_scheduled_tokens else 1
        )
        news = []
        while len(self._in_flight) >= depth:
            news += self._hear()
        return news

    def _execute(self, output: SchedulerOutput) -> ModelOutput:
        for runner in self.ranks.runners:
            runner.zero(output)
        for half in self.worker_halves:
            half.begin_step(output.connector_plan)
        executed = self.ranks.execute(output, self._users)
        for half in self.worker_halves:
            half.end_step()
        outcomes = [half.poll() for half in self.worker_halves]
        if self.config.record_logits:
            for req_id, logits in executed.logits.items():
                self.answers[req_id].logits.update(logits)
        return ModelOutput(output.step, executed.sampled, executed.drafts, outcomes)

    def _hear(self) -> list[RequestOutput]:
        news = self.scheduler.update_from_output(self._in_flight.popleft())
        for item in news:
            answer = self.answers[item.req_id]
            answer.token_ids += item.new_token_ids
            answer.finish_reason = item.finish_reason
            answer.num_cached_tokens = item.num_cached_tokens
            answer.kv_transfer_params = item.kv_transfer_params
            if item.finish_reason is not None:
                del self._users[item.req_id]
        return news

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams = SamplingParams(),  # noqa: B008
        *,
        encoder_token_ids: Sequence[Sequence[int]] = (),
    ) -> list[Answer]:
        """Serve these prompts together, to their end.

        Raises:
            RequestError: one of them can't be served; then none is.
            ValueError: not as many encoder inputs as prompts.
            IntegrityError: the engine makes no progress.
        """
        encoders = encoder_token_ids or [()] * len(prompts)
        ids: list[str] = []
        try:
            for prompt, encoder in zip(prompts, encoders, strict=True):
                ids.append(self.add_request(prompt, params, encoder_token_ids=encoder))
        except Exception:
            for req_id in ids:
                self.abort(req_id)
            raise
        self.run()
        return [self.answers[req_id] for req_id in ids]

    def run(self, req_ids: Collection[str] | None = None) -> None:
        """Step until nothing is left to do.

        Args:
            req_ids: only until these requests have ended, whatever transfers are
                under way: the blocks of one that was handed over are kept until
                another engine has read them.

        Raises:
            IntegrityError: the engine makes no progress.
        """
        wanted = None if req_ids is None else set(req_ids)
        connected = self.scheduler_half is not None
        limit = 2 * self.config.scheduler.load_timeout_s if connected else 0.0
        quiet, since = 0, time.monotonic()
        while self.has_work():
            if wanted is not None and wanted.isdisjoint(self._users):
                return
            if self.step():
                quiet, since = 0, time.monotonic()
                continue
            quiet += 1
            if quiet > _PATIENCE and time.monotonic() - since > limit:
                raise IntegrityError(f"no news for {quiet} steps: {self.state()}")
            if connected:
                time.sleep(_PAUSE)

    # -- questions and orders ------------------------------------------------------

    def reset_prefix_cache(
        self, *, local_only: bool = False, weight_epoch: int | None = None
    ) -> bool:
        """Forget all cached KV.

        Args:
            local_only: leave what the connector has stored.
            weight_epoch: the model's weights have changed, see
                `Scheduler.reset_prefix_cache`; the connector forgets too.

        Returns:
            False while something holds blocks: call again after the next step, without
            `weight_epoch`.

        Raises:
            ConfigError: the epoch is no integer above the last one.
        """
        if local_only and weight_epoch is None:
            return self.manager.reset_prefix_cache()
        return self.scheduler.reset_prefix_cache(weight_epoch=weight_epoch)

    def state(self) -> dict[str, Any]:
        """Where everything stands, for messages."""
        return self.scheduler.state()

    def check(self) -> None:
        """Verify every invariant that can be seen now.

        Raises:
            IntegrityError: naming the one that does not hold.
        """
        held = self.scheduler.references.held
        self.scheduler.check(held.elements())
        if self.scheduler_half is not None:
            self.scheduler_half.check()
        for runner in self.ranks.runners:
            runner.batch.check()
        if not self.has_work() and self.manager.usage and not held.total():
            raise IntegrityError(f"nothing to do, blocks in use: {self.state()}")

    def close(self) -> None:
        """Stop the connector."""
        for half in self.worker_halves:
            half.close()
        if self.scheduler_half is not None:
            self.scheduler_half.close()


def _with_lookahead(config: EngineConfig) -> EngineConfig:
    """Slots for what a drafter writes behind a step: all drafts but the last."""
    scheduler = config.scheduler
    most = max(config.num_drafts - 1, scheduler.num_lookahead_tokens)
    scheduler = structs.replace(scheduler, num_lookahead_tokens=most)
    return structs.replace(config, scheduler=scheduler)


def _make_manager(
    plan: MemoryPlan, config: EngineConfig, use_eagle: bool, plugins: Hooks | None
) -> KVCacheManager:
    """Args: `use_eagle` is whether a drafter keeps KV of its own."""
    caching = config.enable_prefix_caching
    return KVCacheManager(
        plan.scheduler,
        plan.limits.max_model_len,
        plan.hash_block_size,
        enable_caching=caching,
        use_eagle=use_eagle,
        limits=plan.limits,
        hash_format=get_hash_format(DEFAULT_FORMAT) if caching else None,
        eviction_policy=config.eviction_policy,
        eviction_policy_options=config.eviction_policy_options,
        hooks=plugins,
    )


def _sink_blocks(manager: KVCacheManager) -> dict[int, list[int]]:
    """Group -> blocks that all its requests share."""
    return {
        group: list(single.sink_blocks)
        for group, single in enumerate(manager.coordinator.single_type_managers)
        if isinstance(single, SinkFullAttentionManager) and single.sink_blocks
    }
