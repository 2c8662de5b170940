"""Beside another connector: what that one has not brought yet is not stored."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvplugin.contract import (
    CopyJob,
    Lookup,
    Step,
    Transport,
    WorkerHalf,
    WorkerOutcome,
)
from kvplugin.testing import FakeTransport, Fate, RemoteKV, RemoteWorker
from tests.offload.hybrid_lab import HybridLab
from tests.offload.hybrid_mixes import MIXES
from tests.offload.hybrid_witness import Witness

DOCUMENT = [*range(100, 132)]
TAIL = [7, 7, 7]


class Pair:
    """A scheduler half of two: a remote brings tokens, and offload stores them."""

    def __init__(self, remote: RemoteKV, offload: Witness) -> None:
        self.remote, self.offload = remote, offload

    def __getattr__(self, name: str) -> Any:
        return getattr(self.offload, name)

    def bind_blocks(self, blocks: Any) -> None:
        self.remote.bind_blocks(blocks)
        self.offload.bind_blocks(blocks)

    def lookup(self, request: Any, num_local_tokens: int) -> Lookup:
        answer = self.remote.lookup(request, num_local_tokens)
        if answer.tokens or not answer.ready:
            return answer
        return self.offload.lookup(request, num_local_tokens)

    def allocated(
        self, request: Any, rows: tuple[Sequence[int], ...], num_external: int
    ) -> None:
        brings = request.request_id in self.remote.offers
        self.remote.allocated(request, rows, num_external if brings else 0)
        self.offload.allocated(request, rows, 0 if brings else num_external)

    def plan_step(self, step: Step) -> bytes:
        plans = [half.plan_step(step).hex() for half in (self.remote, self.offload)]
        return json.dumps(plans).encode() if any(plans) else b""

    def finished(self, request: Any) -> bool:
        return self.offload.finished(request)

    def has_pending_work(self) -> bool:
        return self.remote.has_pending_work() or self.offload.has_pending_work()


class PairWorker:
    """A worker half of two."""

    def __init__(self, remote: RemoteWorker, offload: Any) -> None:
        self.remote, self.offload = remote, offload

    def __getattr__(self, name: str) -> Any:
        return getattr(self.offload, name)

    def begin_step(self, plan: bytes) -> None:
        plans = json.loads(plan) if plan else ["", ""]
        for half, own in zip((self.remote, self.offload), plans, strict=True):
            half.begin_step(bytes.fromhex(own))

    def poll(self) -> WorkerOutcome:
        remote, own = self.remote.poll(), self.offload.poll()
        return WorkerOutcome(
            remote.finished_loads | own.finished_loads,
            {**remote.failed_loads, **own.failed_loads},
            own.finished_sends,
            own.report,
        )


class PairLab(HybridLab):
    """A laboratory with both."""

    def make_connector(self) -> Any:
        self.remote = RemoteKV()
        return Pair(self.remote, super().make_connector())

    def make_transport(self, fate_of: Callable[[CopyJob], Fate]) -> FakeTransport:
        self.arrivals = FakeTransport(self.remote.execute(self.memory), held=True)
        return super().make_transport(fate_of)

    def make_workers(
        self, make_worker: Callable[[Transport], WorkerHalf] | None
    ) -> list[WorkerHalf]:
        (own,) = super().make_workers(make_worker)
        remote = RemoteWorker(self.remote, self.memory, self.arrivals)
        return [PairWorker(remote, own)]

    def bring(self, prompt: Sequence[int], tokens: int, n: int = 1) -> str:
        """A request of whose prompt the remote has so many tokens; its id."""
        self.remote.offers[f"r{len(self.requests)}"] = tokens
        return self.add(prompt, n)


@pytest.mark.parametrize("name", MIXES)
def test_blocks_that_the_other_one_fills_are_stored_when_it_has(name: str) -> None:
    lab = PairLab(MIXES[name])
    lab.bring([*DOCUMENT, *TAIL], len(DOCUMENT))
    lab.steps(3)
    (load,) = lab.arrivals.pending
    awaited = {block for _, blocks, _ in load.parts for block in blocks}
    assert awaited
    assert not lab.jobs(store=True), "it stores what is not there yet"
    lab.arrivals.complete(load.id)
    lab.run()
    # What was stored then is what the other one brought: read, and so verified.
    lab.forget_local()
    lab.serve([*DOCUMENT, *TAIL, 1], 2)
    lab.drain()
    if name in ("full", "latent, nothing cached"):
        assert lab.witness.credited  # others lack what only the other one computed


@pytest.mark.parametrize("name", MIXES)
def test_blocks_of_a_store_under_way_are_not_filled_by_the_other_one(
    name: str,
) -> None:
    """The request of a store has ended, and somebody else's blocks are to be filled
    from elsewhere, in a pool with hardly any others."""
    lab = PairLab(MIXES[name], usable=lab_size(name))
    lab.hold()
    lab.add(DOCUMENT, 1)
    lab.steps(4)
    assert not lab.scheduler.requests
    stores = lab.pending(store=True)
    assert stores
    lab.forget_local()
    lab.bring([*range(500, 516), *TAIL], 16)
    lab.steps(2)
    sources = {b for job in stores for _, blocks, _ in job.parts for b in blocks}
    for load in lab.arrivals.pending:
        targets = {b for _, blocks, _ in load.parts for b in blocks}
        assert sources.isdisjoint(targets)
        lab.arrivals.complete(load.id)
    lab.arrivals.held = False
    lab.complete(*stores)
    lab.let_go()
    lab.forget_local()
    lab.serve([*DOCUMENT, *TAIL], 2)  # stored before, and still right
    assert lab.witness.credited
    lab.drain()


def lab_size(name: str) -> int:
    """Blocks for one request of the document, and a few."""
    groups = MIXES[name].models
    return sum(-(-40 // group.block_size) for group in groups) + 4
