"""`KVPluginScheduler` on either vLLM, without an engine: a scheduler by hand and a
model that knows each token by its request and place."""

import logging
import os
from collections import deque
from contextlib import nullcontext
from importlib import import_module
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import vllm
from vllm.v1.core.sched import scheduler as vllm_scheduler

from kvplugin.integration.vllm.scheduler import KVPluginScheduler, own_class
from tests.oracles import V019, vllm_core
from tests.oracles.outputs import model_output
from tests.oracles.policy_drive import VOCABULARY, Outcome, PolicyRun


def answer(runs: list[PolicyRun]) -> list[Outcome]:
    """The outcome of each run."""
    os.environ.pop("KVPLUGIN_DISABLE", None)
    return [_outcome(run) for run in runs]


def _outcome(run: PolicyRun) -> Outcome:
    before = vllm_scheduler.KVCacheManager
    errors = Errors()
    with (
        patch.dict(os.environ, run.environment),
        _newer(run.newer),
        _failing(run.fails),
        errors,
    ):
        try:
            scheduler = make_scheduler(run)
        except Exception as error:
            return Outcome(error=f"{type(error).__name__}: {error}")
        outcome = _Drive(run, scheduler).run()
    outcome.kind = type(scheduler).__name__
    outcome.restored = vllm_scheduler.KVCacheManager is before
    outcome.errors = errors.messages
    return outcome


def _newer(name: str) -> Any:
    if not name:
        return nullcontext()
    module, _, class_name = name.rpartition(".")
    changed = getattr(import_module(f"vllm.v1.core.{module}"), class_name)
    return patch.object(changed, "in_a_newer_version", lambda self: None, create=True)


def _failing(name: str) -> Any:
    if not name:
        return nullcontext()
    boom = RuntimeError(f"boom in {name}")
    return patch(f"kvplugin.{name}", side_effect=boom)


class Errors(logging.Handler):
    """What kvplugin logs while it is entered."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def __enter__(self) -> "Errors":
        logging.getLogger("vllm.kvplugin").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("vllm.kvplugin").removeHandler(self)


def make_scheduler(run: PolicyRun, config: Any = None) -> Any:
    """A scheduler as the engine makes it, by default for `config_of(run)`."""
    config = config or config_of(run)
    arguments = {
        "vllm_config": config,
        "kv_cache_config": vllm_core.config(run.num_blocks, run.groups),
        "structured_output_manager": SimpleNamespace(
            should_advance=lambda request: False,
            accept_tokens=lambda request, tokens: True,
        ),
        "block_size": run.block_size,
        "include_finished_set": False,
        "log_stats": True,
        "mm_registry": SimpleNamespace(supports_multimodal_inputs=lambda config: False),
    }
    if not vllm.__version__.startswith(V019):
        arguments["hash_block_size"] = run.block_size
    kind = own_class(config) if run.settings is None else KVPluginScheduler
    return kind(**arguments)


def config_of(run: PolicyRun) -> Any:
    """The parts of a VllmConfig that either scheduler reads."""
    return SimpleNamespace(
        additional_config={"kvplugin": run.settings or {}},
        scheduler_config=SimpleNamespace(
            max_num_seqs=6,
            max_num_active_seqs=None,
            max_num_scheduled_tokens=None,
            max_num_batched_tokens=40,
            policy=run.policy,
            long_prefill_token_threshold=0,
            long_prefill_token_threshold_adaptive=False,
            enable_chunked_prefill=True,
            scheduler_reserve_full_isl=True,
            async_scheduling=run.in_flight > 1,
            watermark=0.0,
        ),
        cache_config=SimpleNamespace(
            num_gpu_blocks=run.num_blocks,
            enable_prefix_caching=True,
            mamba_cache_mode="align",
            block_size=run.block_size,
            enable_mamba_shared_prefix_checkpoint=False,
        ),
        parallel_config=SimpleNamespace(
            data_parallel_index=0,
            data_parallel_rank=0,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            pipeline_parallel_size=1,
        ),
        observability_config=SimpleNamespace(
            kv_cache_metrics=False,
            enable_mfu_metrics=False,
            per_request_spec_decode_metrics="none",
            enable_logging_iteration_details=False,
        ),
        model_config=SimpleNamespace(
            is_encoder_decoder=False,
            max_model_len=128,
            enable_return_routed_experts=False,
            uses_mrope=False,
            runner_type="generate",
            is_diffusion=False,
            supports_multimodal_inputs=False,
            return_sampling_mask=False,
        ),
        ec_manager_config=SimpleNamespace(get_encoder_cache_manager_obj=lambda: None),
        aux_output_config=SimpleNamespace(enabled=False),
        is_mm_encoder_only=False,
        diffusion_config=None,
        lora_config=None,
        kv_events_config=None,
        kv_transfer_config=None,
        ec_transfer_config=None,
        speculative_config=None,
        max_concurrent_batches=run.in_flight,
        num_speculative_tokens=0,
        num_lookahead_tokens=0,
        num_prefill_lookahead_tokens=0,
        max_in_flight_tokens=128,
        use_v2_model_runner=False,
    )


class _Drive:
    """Users and a model around a scheduler."""

    def __init__(self, run: PolicyRun, scheduler: Any) -> None:
        self._run = run
        self._scheduler = scheduler
        self._random = Random(run.seed)
        self._hasher = vllm_core.hasher(run.block_size)
        self._hot = [self._words(32) for _ in range(2)]
        self._under_way: deque[tuple[Any, dict[str, list[int]]]] = deque()
        self._out = Outcome()
        self._count = 0

    def run(self) -> Outcome:
        for _ in range(self._run.steps):
            arrives, aborts, resets = (self._random.random() for _ in range(3))
            if arrives < 0.5:
                self._ask()
            self._step()
            if aborts < 0.03:
                self._abort(f"r{self._count}")
            if resets < 0.02:
                assert self._scheduler.reset_prefix_cache(reset_running_requests=True)
        for _ in range(2000):
            if not self._scheduler.has_unfinished_requests():
                break
            self._step()
        while self._under_way:
            self._answer()
        pool = self._scheduler.kv_cache_manager.block_pool
        self._out.free = pool.get_num_free_blocks()
        if (kvp := getattr(pool, "kvp", None)) is not None:
            kvp.check()
            self._out.failures = kvp.failures
        assert not self._scheduler.requests, "some requests never ended"
        assert self._scheduler.reset_prefix_cache()
        self._scheduler.shutdown()
        return self._out

    def _words(self, n: int) -> list[int]:
        return [self._random.randrange(VOCABULARY) + 2 for _ in range(n)]

    def _ask(self) -> None:
        """Half of the prompts share a prefix, the others are long and unique."""
        self._count += 1
        name, random = f"r{self._count}", self._random
        shared, words = random.choice(self._hot), self._words(random.randrange(20, 60))
        prompt = shared + words[:6] if random.random() < 0.5 else words
        request = vllm_core.request(name, prompt, self._hasher)
        request.max_tokens = random.randrange(1, 12)
        request.priority = random.randrange(3)
        request.arrival_time = float(self._count)
        self._scheduler.add_request(request)

    def _abort(self, name: str) -> None:
        if name not in self._scheduler.requests:
            return
        status = vllm_scheduler.RequestStatus.FINISHED_ABORTED
        self._out.aborted.append(name)
        self._scheduler.finish_requests(name, status)

    def _step(self) -> None:
        output = self._scheduler.schedule()
        self._note(output)
        self._under_way.append((output, self._tokens(output)))
        if len(self._under_way) >= self._run.in_flight:
            self._answer()

    def _note(self, output: Any) -> None:
        out = self._out
        for new in output.scheduled_new_reqs:
            out.admitted.append(new.req_id)
            out.cached += new.num_computed_tokens
        out.preempted += sorted(output.preempted_req_ids or ())
        cached = output.scheduled_cached_reqs
        out.transcript.append(
            (
                dict(output.num_scheduled_tokens),
                [(n.req_id, n.block_ids) for n in output.scheduled_new_reqs],
                list(zip(cached.req_ids, cached.new_block_ids, strict=True)),
                sorted(output.preempted_req_ids or ()),
            )
        )

    def _tokens(self, output: Any) -> dict[str, list[int]]:
        """One token for each request whose known tokens are all computed."""
        tokens: dict[str, list[int]] = {}
        for name in output.num_scheduled_tokens:
            request = self._scheduler.requests[name]
            place = Random(f"{name}/{request.num_computed_tokens}")
            word = place.randrange(VOCABULARY) + 2
            tokens[name] = [] if request.is_prefill_chunk else [word]
        return tokens

    def _answer(self) -> None:
        output, tokens = self._under_way.popleft()
        answer = model_output(tokens)
        for client in self._scheduler.update_from_output(output, answer).values():
            for one in client.outputs:
                self._out.texts.setdefault(one.request_id, []).extend(one.new_token_ids)
