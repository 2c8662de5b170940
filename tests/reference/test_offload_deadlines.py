"""Transfers that do not end: the request goes on, the blocks wait."""

from collections.abc import Sequence
from typing import Any

import pytest

from kvplugin.integration.reference import LayerConfig, SamplingParams
from kvplugin.testing import COMPLETES, NEVER_ENDS
from tests.reference.bench import Bench, of_loads, of_stores, tokens, window
from tests.reference.models import (
    FULL,
    MLA,
    RECURRENT,
    WINDOW,
    assert_empty,
    compare,
)

LAYERS = [
    pytest.param((FULL, WINDOW), id="full+window"),
    pytest.param((MLA, MLA), id="mla"),
    pytest.param((window(9), RECURRENT, FULL), id="window+recurrent+full"),
]
PROMPT = tokens(41)


class Timed:
    """A bench whose time stands still."""

    def __init__(self, layers: Sequence[LayerConfig], **more: Any) -> None:
        self.now = 0.0
        offload = {"transfer_timeout_s": 5.0, "max_overdue_fraction": 1.0}
        offload |= more.pop("offload", {})
        self.bench = Bench(
            layers,
            offload=offload,
            clock=lambda: self.now,
            max_num_batched_tokens=24,
            load_timeout_s=100.0,
            **more,
        )

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.bench.engine.step()
            self.bench.engine.check()

    def gauge(self) -> float:
        half = self.bench.engine.scheduler_half
        stats = half.take_stats() if half is not None else None
        return -1.0 if stats is None else stats.gauges.get("overdue_blocks", -1.0)

    def release(self) -> None:
        for transport in self.bench.transports:
            transport.release()
        self.steps(3)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("layers", LAYERS)
def test_a_request_goes_on_without_its_load(
    layers: Sequence[LayerConfig], ranks: int
) -> None:
    """Past `transfer_timeout_s` it is computed; what the load may still write stays
    out of use until the load ends, and what it then writes harms nobody."""
    timed = Timed(layers, fate=of_loads(NEVER_ENDS), tensor_parallel_size=ranks)
    bench, engine = timed.bench, timed.bench.engine
    bench.ask(PROMPT)
    bench.forget_local()
    req_id = bench.add(PROMPT)
    timed.steps(5)
    (load,) = bench.transport.pending
    assert not engine.answers[req_id].token_ids
    timed.now = 6.0
    timed.steps(12)
    answer = engine.answers[req_id]
    assert answer.finish_reason == "length"
    compare(bench.model, PROMPT, answer)
    held = {block for _, blocks, _ in load.parts for block in blocks}
    assert set(engine.scheduler.references.held.elements()) == held
    assert timed.gauge() == len(held)
    assert not engine.has_work()  # nobody waits for it
    other = [*PROMPT[:-1], 3]
    req_id = engine.add_request(other, SamplingParams(max_tokens=4))
    timed.steps(12)
    compare(bench.model, other, engine.answers[req_id])
    timed.release()
    assert not engine.scheduler.references.held.total()
    assert_empty(engine)
    bench.ask(PROMPT)


@pytest.mark.parametrize("layers", LAYERS)
def test_the_end_of_a_request_does_not_wait_for_its_stores(
    layers: Sequence[LayerConfig],
) -> None:
    timed = Timed(layers, fate=of_stores(NEVER_ENDS))
    bench, engine = timed.bench, timed.bench.engine
    req_id = bench.add(PROMPT)
    timed.steps(8)
    assert engine.answers[req_id].finish_reason == "length"
    assert engine.has_work()
    timed.now = 6.0
    timed.steps(2)
    assert not engine.has_work()
    stores = bench.jobs(store=True)
    read = {block for job in stores for _, blocks, _ in job.parts for block in blocks}
    assert set(engine.scheduler.references.held.elements()) == read
    timed.release()
    assert_empty(engine)
    bench.forget_local()
    assert bench.ask(PROMPT)  # what arrived late is as good


def test_with_too_much_overdue_nothing_is_loaded_or_stored() -> None:
    """`max_overdue_fraction`: a tier that hangs is left alone until it answers."""
    hangs = [True]
    timed = Timed(
        (FULL, WINDOW),
        fate=lambda job: NEVER_ENDS if hangs[0] and not job.store else COMPLETES,
        offload={"max_overdue_fraction": 0.05},
        num_blocks=120,
    )
    bench, engine = timed.bench, timed.bench.engine
    bench.ask(PROMPT)
    bench.forget_local()
    bench.add(PROMPT)
    timed.steps(3)
    timed.now = 6.0
    timed.steps(12)
    hangs[0] = False
    before = len(bench.transport.submitted)
    for prompt in (PROMPT, tokens(30, 1)):
        engine.reset_prefix_cache(local_only=True)
        req_id = engine.add_request(prompt)
        timed.steps(20)
        compare(bench.model, prompt, engine.answers[req_id])
    assert len(bench.transport.submitted) == before
    timed.release()
    bench.forget_local()
    assert bench.ask(PROMPT) == 0, "what hung has left host memory"
    bench.forget_local()
    assert bench.ask(PROMPT) == 40


def test_an_abort_of_a_request_whose_load_is_overdue() -> None:
    timed = Timed((FULL, WINDOW), fate=of_loads(NEVER_ENDS))
    bench, engine = timed.bench, timed.bench.engine
    bench.ask(PROMPT)
    bench.forget_local()
    req_id = engine.add_request(PROMPT)
    timed.steps(3)
    timed.now = 6.0
    engine.abort(req_id)
    timed.steps(5)
    assert engine.scheduler.references.held.total()
    timed.release()
    assert_empty(engine)
