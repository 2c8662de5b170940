"""vLLM 0.19.1's own scheduler, with its own KV-cache manager or with ours in its place.

A drop-in must answer to the names that the scheduler uses and with objects that it
reads; equal runs show both.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from vllm.v1.core.sched import scheduler as vllm_scheduler

from kvplugin import spec as our_specs
from kvplugin.hashing import get_hash_format
from kvplugin.manager import KVCacheManager as OurManager
from kvplugin.parity import V019
from tests.oracles import vllm_core
from tests.oracles.outputs import model_output
from tests.oracles.scheduler_drive import Run, drive


@dataclass
class _Speculative:
    num_speculative_tokens: int

    def use_eagle(self) -> bool:
        return True

    def uses_draft_model(self) -> bool:
        return False


def answer(runs: list[Run]) -> list[tuple[list[Any], list[Any]]]:
    """Of each run the transcript with vLLM's manager and that with ours."""
    return [(_transcript(run, ours=False), _transcript(run, ours=True)) for run in runs]


def _transcript(run: Run, ours: bool) -> list[Any]:
    kind = _drop_in(run) if ours else vllm_scheduler.KVCacheManager
    with patch.object(vllm_scheduler, "KVCacheManager", kind):
        scheduler = vllm_scheduler.Scheduler(
            _config(run),
            vllm_core.config(run.num_blocks, run.groups),
            structured_output_manager=SimpleNamespace(
                should_advance=lambda request: False
            ),
            block_size=run.block_size,
            mm_registry=SimpleNamespace(
                supports_multimodal_inputs=lambda config: False
            ),
            log_stats=True,
        )
    assert isinstance(scheduler.kv_cache_manager, OurManager) is ours
    return drive(run, _Engine(run, scheduler))


def _drop_in(run: Run) -> Any:
    def make(kv_cache_config: Any, **settings: Any) -> OurManager:
        groups = tuple(
            our_specs.KVCacheGroupSpec(
                tuple(group.layer_names), getattr(our_specs, name)(**fields)
            )
            for group, (name, fields) in zip(
                kv_cache_config.kv_cache_groups, run.groups, strict=True
            )
        )
        return OurManager(
            our_specs.KVCacheConfig(kv_cache_config.num_blocks, (), groups),
            **settings,
            hash_format=get_hash_format("vllm019_sha256_cbor", seed="0"),
            parity=V019,
        )

    return make


def _config(run: Run) -> Any:
    """The parts of a VllmConfig that the scheduler reads; a real one needs a model."""
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(
            max_num_seqs=8,
            max_num_scheduled_tokens=None,
            max_num_batched_tokens=run.budget,
            policy=run.policy,
            long_prefill_token_threshold=0,
            enable_chunked_prefill=True,
            scheduler_reserve_full_isl=run.reserve_full_isl,
            async_scheduling=False,
        ),
        cache_config=SimpleNamespace(
            num_gpu_blocks=run.num_blocks,
            enable_prefix_caching=run.enable_caching,
            mamba_cache_mode="align",
            block_size=run.block_size,
        ),
        lora_config=None,
        kv_events_config=None,
        parallel_config=SimpleNamespace(
            data_parallel_index=0,
            data_parallel_rank=0,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            pipeline_parallel_size=1,
        ),
        observability_config=SimpleNamespace(
            kv_cache_metrics=False, enable_mfu_metrics=False
        ),
        model_config=SimpleNamespace(
            is_encoder_decoder=False,
            max_model_len=run.max_model_len,
            enable_return_routed_experts=False,
        ),
        kv_transfer_config=None,
        ec_transfer_config=None,
        speculative_config=_Speculative(run.drafts) if run.drafts else None,
    )


class _Engine:
    """The driver's view of vLLM's scheduler."""

    def __init__(self, run: Run, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.hasher = vllm_core.hasher(run.block_size)
        self.output: Any = None

    def add(
        self, name: str, tokens: list[int], max_tokens: int, priority: int, arrival: int
    ) -> None:
        request = vllm_core.request(name, tokens, self.hasher)
        request.max_tokens = max_tokens
        request.priority, request.arrival_time = priority, arrival
        self.scheduler.add_request(request)

    def live(self) -> list[str]:
        return list(self.scheduler.requests)

    def abort(self, name: str) -> None:
        status = vllm_scheduler.RequestStatus.FINISHED_ABORTED
        self.scheduler.finish_requests(name, status)

    def schedule(self) -> tuple[Any, ...]:
        output = self.output = self.scheduler.schedule()
        cached = output.scheduled_cached_reqs
        return (
            dict(output.num_scheduled_tokens),
            [
                (new.req_id, new.block_ids, new.num_computed_tokens)
                for new in output.scheduled_new_reqs
            ],
            list(
                zip(
                    cached.req_ids,
                    cached.new_block_ids,
                    cached.num_computed_tokens,
                    strict=True,
                )
            ),
            sorted(cached.resumed_req_ids),
            sorted(output.preempted_req_ids or ()),
            list(output.num_common_prefix_blocks)
            if output.num_scheduled_tokens
            else [],
        )

    def batch(self) -> list[tuple[str, int, bool]]:
        drafts = self.output.scheduled_spec_decode_tokens
        requests = self.scheduler.requests
        return [
            (
                name,
                len(drafts.get(name, ())),
                requests[name].num_computed_tokens >= requests[name].num_tokens,
            )
            for name in self.output.num_scheduled_tokens
        ]

    def answer(
        self, tokens: dict[str, list[int]], drafts: dict[str, list[int]]
    ) -> None:
        for name, new in drafts.items():
            self.scheduler.requests[name].spec_token_ids = new
        self.scheduler.update_from_output(self.output, model_output(tokens))

    def blocks(self) -> tuple[Any, ...]:
        manager = self.scheduler.kv_cache_manager
        return manager.block_pool.get_num_free_blocks(), round(manager.usage, 9)
