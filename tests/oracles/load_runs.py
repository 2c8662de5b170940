"""A scheduler, a connector whose loads fail, and a model whose every token depends on
all that it reads: on either vLLM, without an engine, one or more steps under way."""

import os
from collections import deque
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched import scheduler as vllm_scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from tests.oracles import vllm_core
from tests.oracles.load_drive import Ask, LoadOutcome, LoadRun
from tests.oracles.load_model import Load, Memory, Worker, truth
from tests.oracles.outputs import model_output
from tests.oracles.policy_runs import Errors, config_of, make_scheduler


def answer(runs: list[LoadRun]) -> list[LoadOutcome]:
    """The outcome of each run."""
    os.environ.pop("KVPLUGIN_DISABLE", None)
    return [_outcome(run) for run in runs]


def _outcome(run: LoadRun) -> LoadOutcome:
    config = config_of(run.run)
    config.scheduler_config.max_num_batched_tokens = run.budget
    config.scheduler_config.long_prefill_token_threshold = run.chunk
    if run.pipelined:
        config.scheduler_config.async_scheduling = False
        config.parallel_config.pipeline_parallel_size = run.run.in_flight
    config.kv_transfer_config = SimpleNamespace(
        kv_load_failure_policy=run.failure_policy,
        is_kv_consumer=True,
        is_kv_producer=False,
    )
    groups = vllm_core.config(run.run.num_blocks, run.run.groups)
    connector = Connector(config, KVConnectorRole.SCHEDULER, groups)
    factory = SimpleNamespace(create_connector=lambda **kwargs: connector)
    with patch.object(vllm_scheduler, "KVConnectorFactory", factory), Errors() as log:
        if run.missing:
            method = getattr(vllm_scheduler.Scheduler, run.missing)
            delattr(vllm_scheduler.Scheduler, run.missing)
        scheduler = make_scheduler(run.run, config)
        if run.missing:
            setattr(vllm_scheduler.Scheduler, run.missing, method)
        drive = _Drive(run, scheduler, connector)
        try:
            drive.go()
        except Exception as error:
            drive.out.error = f"{type(error).__name__}: {error}"
    drive.out.kind = type(scheduler).__name__
    drive.out.errors = log.messages
    return drive.out


class Metadata(KVConnectorMetadata):
    """The loads that begin with a step."""

    def __init__(self, loads: list[Load]) -> None:
        self.loads = loads


class Connector(KVConnectorBase_V1, SupportsHMA):
    """Says that it has what each request's `Ask` claims."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.asks: dict[str, Ask] = {}
        self.claims: dict[str, int] = {}
        self.gone: set[str] = set()
        """Requests whose asynchronous load failed: it is not offered again, as vLLM
        expects of a connector."""
        self._local: dict[str, int] = {}
        self._loads: list[Load] = []

    def get_num_new_matched_tokens(self, request: Any, local: int) -> tuple[int, bool]:
        name = request.request_id
        self.claims[name] = self.claims.get(name, 0) + 1
        self._local[name] = local
        ask = self.asks[name]
        n = 0 if name in self.gone else max(ask.claimed - local, 0)
        return n, ask.is_async and n > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, n: int) -> None:
        if n > 0:
            name = request.request_id
            begin = self._local[name]
            row = [list(ids) for ids in blocks.get_block_ids()]
            tokens = list(request.all_token_ids)
            self._loads.append(Load(name, row, tokens, begin, begin + n))

    def build_connector_meta(self, output: Any) -> Metadata:
        loads, self._loads = self._loads, []
        return Metadata(loads)

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, None]:
        return False, None

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None:
        """Of the worker's half, which is `_worker` here."""
        raise NotImplementedError

    wait_for_layer_load = save_kv_layer = wait_for_save = start_load_kv


class _Drive:
    """Users, a worker and its memory around a scheduler."""

    def __init__(self, run: LoadRun, scheduler: Any, connector: Connector) -> None:
        self._run, self._scheduler, self._connector = run, scheduler, connector
        self._random = Random(run.run.seed)
        self._size = run.run.block_size
        self._hasher = vllm_core.hasher(self._size)
        self._windows = [fields.get("sliding_window") for _, fields in run.run.groups]
        self._memory = Memory(self._size, len(run.run.groups))
        self._worker = Worker(self._memory, self._windows)
        self._under_way: deque[tuple[Any, Any]] = deque()
        self._received: set[str] = set()
        """Asynchronous loads that the next step reports as ended."""
        self._bad_received: set[int] = set()
        self._prefixes: dict[bytes, tuple[int, ...]] = {}
        self._texts: dict[str, list[int]] = {}
        self._aborted: set[str] = set()
        self._asked: dict[str, Ask] = {}
        self._hot = [self._words(32) for _ in range(2)]
        self.out = LoadOutcome()

    def go(self) -> None:
        for step in range(self._run.run.steps):
            arrivals, aborts = self._events(step)
            for ask in arrivals:
                self._ask(ask)
            self._step(aborts)
        for _ in range(2000):
            if not self._scheduler.has_unfinished_requests():
                break
            self._step([])
        while self._under_way:
            self._return()
        self._judge()

    def _events(self, step: int) -> tuple[list[Ask], list[str]]:
        if self._run.script:
            events = self._run.script.get(step, [])
            asks = [event for event in events if isinstance(event, Ask)]
            return asks, [event for event in events if isinstance(event, str)]
        random = self._random
        asks = [self._any_ask()] if random.random() < 0.5 else []
        names = list(self._scheduler.requests)
        aborts = [random.choice(names)] if names and random.random() < 0.1 else []
        return asks, aborts

    def _any_ask(self) -> Ask:
        random = self._random
        words = self._words(random.randrange(20, 60))
        shared = random.choice(self._hot) + words[: random.randrange(1, 30)]
        prompt = shared if random.random() < 0.7 else words
        claimed = random.randrange(len(prompt)) // self._size * self._size
        return Ask(
            f"r{len(self._asked)}",
            prompt,
            claimed if random.random() < 0.7 else 0,
            random.randrange(4) if random.random() < self._run.failures else None,
            random.random() < self._run.asynchronous,
            random.randrange(1, 12),
        )

    def _words(self, n: int) -> list[int]:
        return [self._random.randrange(90) + 2 for _ in range(n)]

    def _ask(self, ask: Ask) -> None:
        self._asked[ask.name] = self._connector.asks[ask.name] = ask
        request = vllm_core.request(ask.name, ask.prompt, self._hasher)
        request.max_tokens = ask.answer
        request.sampling_params.max_tokens = ask.answer
        self._scheduler.add_request(request)

    def _step(self, aborts: list[str]) -> None:
        output = self._scheduler.schedule()
        for new in output.scheduled_new_reqs:
            self.out.cached[new.req_id] = new.num_computed_tokens
        again = output.scheduled_cached_reqs
        for name, n in zip(again.req_ids, again.num_computed_tokens, strict=True):
            if name in again.resumed_req_ids:
                self.out.cached[name] = n
        self.out.preempted += sorted(output.preempted_req_ids or ())
        self._under_way.append((output, self._execute(output)))
        live = [name for name in aborts if name in self._scheduler.requests]
        self._aborted.update(live)
        status = vllm_scheduler.RequestStatus.FINISHED_ABORTED
        self._scheduler.finish_requests(live, status)
        if len(self._under_way) >= self._run.run.in_flight:
            self._return()

    def _execute(self, output: Any) -> ModelRunnerOutput:
        """As a device does: in the order of the steps, whenever it answers."""
        received, self._received = self._received, set()
        bad, self._bad_received = self._bad_received, set()
        for load in output.kv_connector_metadata.loads:
            ask = self._asked[load.name]
            failed = self._memory.load(load, self._windows, ask.fails_at)
            self.out.bad_loads += bool(failed)
            if ask.is_async:
                self._received.add(load.name)
                self._bad_received |= failed
                if failed:
                    self._connector.gone.add(load.name)
            else:
                bad |= failed
        tokens = self._worker.execute(output)
        return model_output(
            tokens,
            kv_connector_output=KVConnectorOutput(
                finished_recving=received or None, invalid_block_ids=bad
            ),
        )

    def _return(self) -> None:
        output, result = self._under_way.popleft()
        for client in self._scheduler.update_from_output(output, result).values():
            for one in client.outputs:
                self._hear(one)
        for request in self._scheduler.requests.values():
            words = tuple(request.all_token_ids)
            for i, block_hash in enumerate(request.block_hashes):
                self._prefixes[block_hash] = words[: (i + 1) * self._size]
        if not self._under_way:
            self._inspect()

    def _hear(self, one: Any) -> None:
        name = one.request_id
        self._texts.setdefault(name, []).extend(one.new_token_ids)
        stats = getattr(one, "prefill_stats", None)
        if stats is not None:
            self.out.counts[name] = stats.num_cached_tokens
        elif hasattr(one, "num_cached_tokens"):
            self.out.counts[name] = one.num_cached_tokens
        if str(one.finish_reason) == "error":
            self.out.failed.append(name)

    def _inspect(self) -> None:
        """Compare cached blocks with what their hashes promise."""
        for block in self._scheduler.kv_cache_manager.block_pool.blocks:
            if block.block_hash is None or block.is_null:
                continue
            prefix = self._prefixes.get(kv_cache_utils.get_block_hash(block.block_hash))
            if prefix is None:
                continue  # of a request that was aborted before its step returned
            group = kv_cache_utils.get_group_id(block.block_hash)
            promised = truth(prefix, self._windows)[group][-self._size :]
            found = self._memory.block(group, block.block_id)
            self.out.poisoned += list(promised) != found

    def _judge(self) -> None:
        scheduler, out = self._scheduler, self.out
        assert not scheduler.requests, f"never ended: {list(scheduler.requests)}"
        for name, ask in self._asked.items():
            words = list(ask.prompt)
            for token in self._texts.get(name, []):
                if token != self._worker.sample(truth(tuple(words), self._windows)):
                    out.wrong.append(name)
                    break
                words.append(token)
            ended = name in self._aborted or name in out.failed
            if not ended and len(self._texts.get(name, [])) != ask.answer:
                out.short.append(name)
        pool = scheduler.kv_cache_manager.block_pool
        out.leaked = self._run.run.num_blocks - 1 - pool.get_num_free_blocks()
        out.claims = self._connector.claims
        assert scheduler.reset_prefix_cache()
        scheduler.shutdown()
