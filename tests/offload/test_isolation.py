"""Who may have whose blocks: both halves, driven by hand, with real requests.

Each dimension is tried in both directions. That another identity finds nothing proves
little where the right one would find nothing either.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvplugin.connectors.offload.config import OffloadConfig
from kvplugin.connectors.offload.scheduler import OffloadScheduler
from kvplugin.connectors.offload.worker import OffloadWorker
from kvplugin.contract import (
    LATER,
    MISS,
    CopyJob,
    EngineInfo,
    GroupInfo,
    GroupKind,
    Lookup,
    ModelIdentity,
    ScheduledRequest,
    Step,
    WorkerOutcome,
)
from kvplugin.hashing import get_hash_format
from kvplugin.layout import PageLayout
from kvplugin.request import Request
from kvplugin.testing.transport import FakeTransport

BLOCK = 4
STORED = 12
"""Tokens of a prompt that are in whole blocks, without the last one."""
NUM_BLOCKS = 1000
PAGE = PageLayout(64, NUM_BLOCKS, interior="FullAttentionSpec/bfloat16")
GROUP = GroupInfo(0, GroupKind.FULL, BLOCK, {"layer": PAGE})
MODEL = ModelIdentity("org/model", "main", "bfloat16", hash_algorithm="kv_sha256")
ENGINE = EngineInfo("engine", (GROUP,), NUM_BLOCKS, BLOCK, model=MODEL)
FORMATS = {name: get_hash_format(name) for name in ("kv_sha256", "vllm032_sha256_cbor")}

_ids = map("request {}".format, itertools.count())


@dataclass(frozen=True)
class Adapter:
    lora_name: str
    lora_path: str = "/adapters/one"
    epoch: int = 0


def media(identifier: str, offset: int = 1) -> Any:
    position = SimpleNamespace(offset=offset, length=3)
    return SimpleNamespace(identifier=identifier, mm_position=position)


def embeds(value: float) -> Any:
    return np.full((STORED + 1, 2), value, dtype=np.float32)


def request(**identity: Any) -> Request:
    """Always the same tokens, of another request."""
    return Request(
        next(_ids),
        identity.pop("tokens", range(STORED + 1)),
        hash_format=FORMATS[identity.pop("hash_format", "kv_sha256")],
        hash_block_size=BLOCK,
        **identity,
    )


class Blocks:
    """References to the engine's blocks, which nobody takes away here."""

    def acquire(self, ids: Sequence[int]) -> None:
        del ids

    def release(self, ids: Sequence[int]) -> None:
        del ids


class Halves:
    """Both halves of one engine, and its memory: what is in each block."""

    def __init__(self) -> None:
        self.config = OffloadConfig(cpu_bytes_to_use=64 * PAGE.page_bytes)
        self.scheduler = OffloadScheduler(ENGINE, self.config)
        self.scheduler.bind_blocks(Blocks())
        self.memory: dict[int, object] = {}
        self.host: dict[int, object] = {}
        self.transport = FakeTransport(self._copy)
        self.worker = self.worker_of(ENGINE)
        self._blocks = itertools.count(1)

    def _copy(self, job: CopyJob) -> int:
        for _, engine_ids, host_ids in job.parts:
            for block, host in zip(engine_ids, host_ids, strict=True):
                if job.store:
                    self.host[host] = self.memory[block]
                else:
                    self.memory[block] = self.host[host]
        return 1

    def worker_of(self, engine: EngineInfo) -> OffloadWorker:
        """A worker half of an engine that may be another one."""
        return OffloadWorker(engine, self.config, lambda pools: self.transport)

    def step(self, plan: Step, worker: OffloadWorker | None = None) -> WorkerOutcome:
        worker = worker or self.worker
        worker.begin_step(self.scheduler.plan_step(plan))
        worker.end_step()
        outcome = worker.poll()
        self.scheduler.apply(filter(None, [outcome.report]))
        return outcome

    def row(self, count: int) -> list[int]:
        return [next(self._blocks) for _ in range(count)]

    def compute(self, asked: Request, worker: OffloadWorker | None = None) -> None:
        """The request's prompt is computed, and stored where nothing is held up."""
        row = self.row(-(-asked.num_tokens // BLOCK))
        self.memory.update((block, (asked.request_id, block)) for block in row)
        self.scheduler.allocated(asked, (row,), 0)
        scheduled = ScheduledRequest(asked.request_id, (), 0, asked.num_tokens)
        self.step(Step([scheduled], num_tokens=asked.num_tokens), worker)

    def offered(self, asked: Request) -> Lookup:
        answer = self.scheduler.lookup(asked, 0)
        self.scheduler.finished(asked)
        return answer

    def load(
        self, asked: Request, worker: OffloadWorker | None = None
    ) -> tuple[list[object], WorkerOutcome]:
        """What is in the request's blocks afterwards, and how the load ended."""
        answer = self.scheduler.lookup(asked, 0)
        assert answer == Lookup(STORED)
        row = self.row(STORED // BLOCK)
        self.scheduler.allocated(asked, (row,), answer.tokens)
        outcome = self.step(Step(), worker)
        self.scheduler.finished(asked)
        return [self.memory.get(block) for block in row], outcome


# -- what is of a request ----------------------------------------------------------

PLAIN: dict[str, Any] = {}
IDENTITIES = {
    "no salt": (PLAIN, {"cache_salt": "tenant"}),
    "salt": ({"cache_salt": "tenant"}, {"cache_salt": "other"}),
    "empty salt": (PLAIN, {"cache_salt": ""}),
    "adapter": ({"lora_request": Adapter("one")}, {"lora_request": Adapter("two")}),
    "no adapter": (PLAIN, {"lora_request": Adapter("one")}),
    "path of the adapter": (
        {"lora_request": Adapter("one")},
        {"lora_request": Adapter("one", "/adapters/two")},
    ),
    "files of the adapter": (
        {"lora_request": Adapter("one")},
        {"lora_request": Adapter("one", epoch=1)},
    ),
    "a salt that is named like an adapter": (
        {"lora_request": Adapter("one")},
        {"cache_salt": "one"},
    ),
    "media": ({"mm_features": [media("cat")]}, {"mm_features": [media("dog")]}),
    "place of media": (
        {"mm_features": [media("cat")]},
        {"mm_features": [media("cat", offset=2)]},
    ),
    "no media": (PLAIN, {"mm_features": [media("cat")]}),
    "embeddings": (
        {"tokens": None, "prompt_embeds": embeds(0.0)},
        {"tokens": None, "prompt_embeds": embeds(1.0)},
    ),
    "weights": (PLAIN, {"weight_epoch": 1}),
    "hash algorithm": (PLAIN, {"hash_format": "vllm032_sha256_cbor"}),
    "first token": (PLAIN, {"tokens": [99, *range(1, STORED + 1)]}),
}
each_identity = pytest.mark.parametrize(
    ("mine", "theirs"), IDENTITIES.values(), ids=IDENTITIES
)


@each_identity
def test_nobody_of_another_identity_finds_a_block(
    mine: dict[str, Any], theirs: dict[str, Any]
) -> None:
    for stored, other in ((mine, theirs), (theirs, mine)):
        halves = Halves()
        first = request(**stored)
        halves.compute(first)
        assert halves.offered(request(**other)) == MISS
        found, _ = halves.load(request(**stored))
        assert found == [(first.request_id, 1 + i) for i in range(STORED // BLOCK)]


@each_identity
def test_both_identities_are_stored_side_by_side(
    mine: dict[str, Any], theirs: dict[str, Any]
) -> None:
    halves = Halves()
    firsts = [request(**identity) for identity in (mine, theirs)]
    for first in firsts:
        halves.compute(first)
    for first, identity in zip(firsts, (mine, theirs), strict=True):
        found, _ = halves.load(request(**identity))
        owners = {entry[0] for entry in found if isinstance(entry, tuple)}
        assert owners == {first.request_id}


@each_identity
def test_nobody_waits_for_a_transfer_of_another_identity(
    mine: dict[str, Any], theirs: dict[str, Any]
) -> None:
    halves = Halves()
    halves.transport.held = True
    halves.compute(request(**mine))
    (store,) = halves.transport.pending
    assert halves.offered(request(**theirs)) == MISS
    assert halves.offered(request(**mine)) == LATER
    halves.compute(request(**theirs))
    assert len(halves.transport.pending) == 2, "a store of their own is no duplicate"
    halves.compute(request(**mine))
    assert len(halves.transport.pending) == 2, "and the same one would be"
    halves.transport.complete(store.id)
    halves.step(Step())
    assert halves.offered(request(**mine)) == Lookup(STORED)
    assert halves.offered(request(**theirs)) == LATER


# -- what is of an engine ----------------------------------------------------------

OTHER_ENGINES = {
    "model": replace(ENGINE, model=replace(MODEL, name="org/other")),
    "revision": replace(ENGINE, model=replace(MODEL, revision="v2")),
    "dtype": replace(ENGINE, model=replace(MODEL, dtype="float16")),
    "quantization": replace(ENGINE, model=replace(MODEL, quantization="fp8")),
    "hash algorithm": replace(ENGINE, model=replace(MODEL, hash_algorithm="sha256")),
    "weights": replace(ENGINE, model=replace(MODEL, weight_epoch=1)),
    "hash block size": replace(ENGINE, hash_block_size=BLOCK // 2),
    "block size": replace(ENGINE, groups=(replace(GROUP, block_size=2 * BLOCK),)),
    "kind of attention": replace(ENGINE, groups=(replace(GROUP, kind=GroupKind.MLA),)),
    "number of ranks": replace(ENGINE, world_size=2),
}


@pytest.mark.parametrize("other", OTHER_ENGINES.values(), ids=OTHER_ENGINES)
def test_a_worker_of_another_engine_copies_nothing(other: EngineInfo) -> None:
    halves = Halves()
    halves.compute(request(), halves.worker_of(other))
    assert halves.transport.submitted == []
    assert halves.offered(request()) == MISS, "a store that was refused is not kept"

    halves.compute(request())
    found, outcome = halves.load(request())
    assert len(found) == STORED // BLOCK
    assert None not in found
    assert not outcome.failed_loads
    copied = len(halves.transport.submitted)

    asked = request()
    found, outcome = halves.load(asked, halves.worker_of(other))
    assert found == [None] * (STORED // BLOCK)
    assert outcome.finished_loads == {asked.request_id}
    assert list(outcome.failed_loads) == [asked.request_id]
    assert len(halves.transport.submitted) == copied

    halves.compute(request())
    assert halves.offered(request()) == Lookup(STORED)
    halves.scheduler.check()


def test_a_worker_of_the_same_engine_may_differ_in_what_is_of_a_rank() -> None:
    """In a pipeline each rank has layers of its own."""
    layers = {"another layer": replace(PAGE, interior="FullAttentionSpec/bfloat16/X")}
    rank = replace(ENGINE, groups=(replace(GROUP, layers=layers),))
    halves = Halves()
    halves.compute(request(), halves.worker_of(rank))
    assert halves.offered(request()) == Lookup(STORED)


# -- new weights -------------------------------------------------------------------


def test_after_a_reset_nothing_of_the_old_weights_is_found() -> None:
    halves = Halves()
    halves.compute(request())
    halves.compute(request(cache_salt="tenant"))
    assert halves.offered(request()) == Lookup(STORED)
    assert halves.scheduler.reset()
    assert halves.offered(request()) == MISS
    assert halves.offered(request(cache_salt="tenant")) == MISS
    halves.compute(request())
    assert halves.offered(request()) == Lookup(STORED), "of the new weights"


def test_what_was_being_stored_at_a_reset_is_of_the_old_weights() -> None:
    halves = Halves()
    halves.transport.held = True
    halves.compute(request())
    halves.scheduler.reset()
    halves.transport.held = False
    halves.step(Step())
    assert halves.offered(request()) == MISS


def test_a_request_that_runs_through_a_reset_stores_nothing_more() -> None:
    """Its prefix may be of the weights before, and all that follows depends on it."""
    halves = Halves()
    long = request(tokens=range(2 * STORED + 1))
    row = halves.row(7)
    halves.memory.update((block, (long.request_id, block)) for block in row)
    halves.scheduler.allocated(long, (row,), 0)
    halves.step(Step([ScheduledRequest(long.request_id, (), 0, STORED)]))
    assert halves.offered(request()) == Lookup(STORED)
    halves.scheduler.reset()
    halves.step(Step([ScheduledRequest(long.request_id, (), STORED, STORED + 1)]))
    halves.scheduler.finished(long)
    assert halves.offered(request(tokens=range(2 * STORED + 1))) == MISS
    assert len(halves.transport.submitted) == 1
    halves.scheduler.check()
