"""The CPU offload connector's halves under the engine: loads, failures, deadlines."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvplugin.connectors.offload.config import OffloadConfig
from kvplugin.connectors.offload.host_copies import HostCopies
from kvplugin.connectors.offload.messages import HostPool
from kvplugin.connectors.offload.scheduler import OffloadScheduler
from kvplugin.connectors.offload.worker import OffloadWorker
from kvplugin.contract import CopyJob, EngineInfo
from kvplugin.integration.reference import ReferenceEngine, SamplingParams
from kvplugin.integration.reference.connector import Connector, offload
from kvplugin.testing import COMPLETES, FAILS, LATE, NEVER_ENDS, TORN, Fate
from kvplugin.testing.faults import FaultyTransport
from tests.reference.models import (
    DIFFKV,
    FULL,
    MLA,
    RECORDS,
    RECURRENT,
    SINK,
    WINDOW,
    assert_empty,
    compare,
    forget_local,
    prompts,
    serve,
    settings,
    step_to_the_end,
    tiny,
)

CONFIG = OffloadConfig(cpu_bytes_to_use=8 << 20, offload_prompt_only=False)
SERVED: dict[str, Any] = {
    "full": (FULL, FULL),
    "diffkv": (DIFFKV, FULL),
    "mla": (MLA, MLA),
    "mla+full": (MLA, FULL),
    "sink": (SINK, SINK),
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("layout", ["NHD", "HND", "BLNHC"])
@pytest.mark.parametrize("layers", SERVED)
def test_loaded_kv_gives_the_dense_answer(layers: str, layout: str, ranks: int) -> None:
    if layout == "BLNHC" and len(set(SERVED[layers])) > 1:
        layout = "NHD"  # layers of two shapes do not lie together
    batch = prompts(3)
    config = settings(layout=layout, tensor_parallel_size=ranks)
    connector = offload(CONFIG)
    rounds = [batch[:1], batch, batch]
    engine, _ = serve(
        tiny(SERVED[layers]), config, rounds, connector=connector, between=forget_local
    )
    assert len(engine.worker_halves) == ranks
    assert all(a.num_cached_tokens for a in list(engine.answers.values())[-3:])
    stats = engine.scheduler_half.take_stats()  # type: ignore[union-attr]
    assert stats is not None
    assert stats.counters["loaded_blocks"] > 0


def test_loaded_records() -> None:
    """Loaded bytes are those that were stored: the answers do not change at all."""
    batch = prompts(2)
    engine, _ = serve(
        tiny((RECORDS, RECORDS), dtype="float32"),
        settings(),
        [batch, batch],
        connector=offload(CONFIG),
        between=forget_local,
        tolerance=0.5,
    )
    answers = list(engine.answers.values())
    assert answers[2].num_cached_tokens
    assert [a.token_ids for a in answers[:2]] == [a.token_ids for a in answers[2:]]


def test_backends_with_keys_before_values_and_kernel_blocks() -> None:
    batch = prompts(3, common=37)
    config = settings(
        backend="FLASH_ATTN", block_size=32, kernel_block_size=16, max_model_len=96
    )
    engine, _ = serve(
        tiny((FULL, FULL)),
        config,
        [batch, batch],
        connector=offload(CONFIG),
        between=forget_local,
    )
    assert list(engine.answers.values())[-1].num_cached_tokens == 32


def test_blocks_that_a_request_gets_after_its_load_are_stored_too() -> None:
    """Its head comes from host memory, the rest is computed: then all comes from
    there."""
    (prompt,) = prompts(1, common=12, own=24)
    engine, _ = serve(
        tiny((FULL, FULL)),
        settings(),
        [[prompt[:17]], [prompt], [prompt]],
        connector=offload(CONFIG),
        between=forget_local,
    )
    hits = [answer.num_cached_tokens for answer in engine.answers.values()]
    assert hits == [0, 16, 32]


def test_a_small_pool_and_a_small_host_tier() -> None:
    """Preemption, eviction on both sides, and loads into a pool under pressure."""
    model, batch = tiny((FULL, FULL)), prompts(6, common=6, own=14)
    block_bytes = 2 * 4 * 2 * 16 * 8
    config = settings(num_blocks=18, scheduler_reserve_full_isl=False)
    small = OffloadConfig(cpu_bytes_to_use=20 * block_bytes, offload_prompt_only=False)
    _, seen = serve(
        model,
        config,
        [batch, batch[::-1], batch],
        connector=offload(small),
        params=SamplingParams(max_tokens=24),
    )
    assert seen.preemptions


# -- transfers that go wrong ----------------------------------------------------------


class ScriptedWorker(OffloadWorker):
    """Copies for real, ends its jobs by script."""

    def __init__(self, info: EngineInfo, fate_of: Callable[[CopyJob], Fate]) -> None:
        super().__init__(info, CONFIG, self._scripted)
        self._fate_of = fate_of

    def _scripted(self, pools: Sequence[HostPool]) -> FaultyTransport:
        assert isinstance(self._copies, HostCopies)
        self._copies.allocate(pools)
        self.transport = FaultyTransport(self._copies.execute, self._fate_of)
        return self.transport


def scripted(
    fate_of: Callable[[CopyJob], Fate], clock: Callable[[], float] = time.monotonic
) -> Connector:
    """Offload whose jobs end as `fate_of` says."""
    return Connector(
        lambda info: OffloadScheduler(info, CONFIG, clock=clock),
        lambda info: ScriptedWorker(info, fate_of),
    )


def of_loads(fate: Fate) -> Callable[[CopyJob], Fate]:
    return lambda job: COMPLETES if job.store else fate


KINDS: dict[str, Any] = {
    "full": (FULL, FULL),
    "full+window": (FULL, WINDOW),
    "window+recurrent+full": (WINDOW, RECURRENT, FULL),
    "mla": (MLA, MLA),
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("layers", KINDS)
@pytest.mark.parametrize("fate", [FAILS, TORN, LATE], ids=["fails", "torn", "late"])
def test_failed_and_late_loads(fate: Fate, layers: str, ranks: int) -> None:
    batch = prompts(3, common=25)
    config = settings(tensor_parallel_size=ranks, max_num_batched_tokens=48)
    connector = scripted(of_loads(fate))
    engine, _ = serve(
        tiny(KINDS[layers]),
        config,
        [batch, batch, batch],
        connector=connector,
        between=forget_local,
    )
    workers = engine.worker_halves
    assert all(
        any(not job.store for job in worker.transport.submitted)
        for worker in workers
        if isinstance(worker, ScriptedWorker)
    )


@pytest.mark.parametrize("layers", KINDS)
def test_a_load_that_fails_on_one_rank_only(layers: str) -> None:
    batch, made = prompts(3), []

    def make_worker(info: EngineInfo) -> ScriptedWorker:
        made.append(info.rank)
        return ScriptedWorker(info, of_loads(FAILS if info.rank else COMPLETES))

    connector = Connector(lambda info: OffloadScheduler(info, CONFIG), make_worker)
    serve(
        tiny(KINDS[layers]),
        settings(tensor_parallel_size=2),
        [batch, batch],
        connector=connector,
        between=forget_local,
    )
    assert made == [0, 1]


@pytest.mark.parametrize("fate", [FAILS, TORN], ids=["fails", "torn"])
@pytest.mark.parametrize("layers", KINDS)
def test_failed_stores_are_never_loaded(fate: Fate, layers: str) -> None:
    batch = prompts(3)
    engine, _ = serve(
        tiny(KINDS[layers]),
        settings(),
        [batch, batch],
        connector=scripted(lambda job: fate),
        between=forget_local,
    )
    assert not list(engine.answers.values())[3].num_cached_tokens


def test_a_request_goes_on_without_a_load_that_is_overdue() -> None:
    model, (prompt,) = tiny((FULL, FULL)), prompts(1)
    now = [0.0]
    connector = scripted(of_loads(NEVER_ENDS))
    config = settings(load_timeout_s=5.0)
    engine = ReferenceEngine(model, config, connector, clock=lambda: now[0])
    engine.generate([prompt], SamplingParams(max_tokens=4))
    forget_local(engine)
    req_id = engine.add_request(prompt, SamplingParams(max_tokens=4))
    for _ in range(5):
        engine.step()
    assert not engine.answers[req_id].token_ids
    now[0] = 6.0
    for _ in range(6):
        engine.step()
    answer = engine.answers[req_id]
    assert answer.finish_reason == "length"
    compare(model, prompt, answer)
    assert engine.has_work()  # its first blocks are held until the transfer ends
    (worker,) = engine.worker_halves
    assert isinstance(worker, ScriptedWorker)
    worker.transport.release()
    step_to_the_end(engine)
    assert_empty(engine)
    engine.close()


def test_requests_can_be_failed_instead_of_recomputed() -> None:
    model, (prompt,) = tiny((FULL, FULL)), prompts(1)
    config = settings(kv_load_failure_policy="fail")
    engine = ReferenceEngine(model, config, scripted(of_loads(FAILS)))
    engine.generate([prompt])
    forget_local(engine)
    (answer,) = engine.generate([prompt])
    assert answer.finish_reason == "error"
    assert_empty(engine)
    engine.close()
