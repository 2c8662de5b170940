"""Our scheduler decides as vLLM 0.19.1's does, over the same random runs."""

from typing import Any

import pytest

from kvplugin.hashing import get_hash_format
from kvplugin.manager import KVCacheManager
from kvplugin.parity import V019 as V019_PARITY
from kvplugin.request import Request
from kvplugin.scheduler import ModelOutput, Scheduler, SchedulerConfig, SchedulerOutput
from kvplugin.spec import KVCacheConfig, KVCacheGroupSpec
from tests.core.test_in_vllm_scheduler import runs
from tests.core.vllm_drives import spec_of
from tests.oracles import V019, ask
from tests.oracles.scheduler_drive import Run, drive

HASHES = get_hash_format("vllm019_sha256_cbor", seed="0")


class Ours:
    """The driver's view of our scheduler."""

    def __init__(self, run: Run) -> None:
        groups = tuple(
            KVCacheGroupSpec((f"layer{i}",), spec_of(group))
            for i, group in enumerate(run.groups)
        )
        self.run = run
        self.manager = KVCacheManager(
            KVCacheConfig(run.num_blocks, (), groups),
            run.max_model_len,
            run.block_size,
            enable_caching=run.enable_caching,
            use_eagle=bool(run.drafts),
            hash_format=HASHES,
            parity=V019_PARITY,
        )
        self.scheduler = Scheduler(
            self.manager,
            SchedulerConfig(
                max_num_batched_tokens=run.budget,
                max_num_seqs=8,
                policy=run.policy,
                num_lookahead_tokens=run.drafts,
                scheduler_reserve_full_isl=run.reserve_full_isl,
            ),
        )
        self.output: SchedulerOutput

    def add(
        self, name: str, tokens: list[int], max_tokens: int, priority: int, arrival: int
    ) -> None:
        request = Request(
            name,
            tokens,
            hash_format=HASHES,
            hash_block_size=self.run.block_size,
            priority=priority,
            arrival_time=arrival,
        )
        self.scheduler.add_request(request, max_tokens, stop_token_ids=[1])

    def live(self) -> list[str]:
        return list(self.scheduler.requests)

    def abort(self, name: str) -> None:
        self.scheduler.abort_request(name)
        self.scheduler.check()

    def schedule(self) -> tuple[Any, ...]:
        output = self.output = self.scheduler.schedule()
        self.scheduler.check()
        cached = output.scheduled_cached_reqs
        return (
            dict(output.num_scheduled_tokens),
            [
                (new.req_id, new.block_ids, new.num_computed_tokens)
                for new in output.scheduled_new_reqs
            ],
            [(c.req_id, c.new_block_ids, c.num_computed_tokens) for c in cached],
            sorted(c.req_id for c in cached if c.resumed),
            sorted(output.preempted_req_ids),
            list(output.num_common_prefix_blocks)
            if output.num_scheduled_tokens
            else [],
        )

    def batch(self) -> list[tuple[str, int, bool]]:
        drafts = self.output.scheduled_spec_decode_tokens
        requests = {n: self.scheduler.requests[n].request for n in self.live()}
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
        output = ModelOutput(self.output.step, tokens, drafts)
        self.scheduler.update_from_output(output)
        self.scheduler.check()

    def blocks(self) -> tuple[Any, ...]:
        pool = self.manager.block_pool
        return pool.get_num_free_blocks(), round(self.manager.usage, 9)


def compare(runs: list[Run]) -> None:
    for run, (theirs, _) in zip(runs, ask(V019, "scheduler_runs", runs), strict=True):
        ours = drive(run, Ours(run))
        assert len(ours) == len(theirs) == 2 * run.steps
        for i, (their, our) in enumerate(zip(theirs, ours, strict=True)):
            assert our == their, f"{run}, entry {i}"


def test_decisions_are_those_of_vllm() -> None:
    compare(runs(range(20, 21)))


@pytest.mark.full
def test_decisions_are_those_of_vllm_for_long() -> None:
    compare(runs(range(21, 40)))
