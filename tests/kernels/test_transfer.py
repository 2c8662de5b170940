"""Between device and host each job goes by the engine that the table names."""

import logging
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvplugin.kernels import choice, transfer
from kvplugin.kernels.choice import ANY_CARD, Engine, Row
from kvplugin.kernels.dma import DmaBlockCopier
from kvplugin.kernels.host import BlockCopier
from kvplugin.kernels.region import Region, staging_regions
from kvplugin.kernels.streams import Direction
from kvplugin.kernels.transfer import TransferCopier
from tests.kernels.memcpy_apis import Memmove

LOAD, STORE = Direction
DMA, TRITON = Engine
BLOCKS = 16
NBYTES = 32 << 10
CARD = "a card"
FEW = 4
"""Pieces from which `TABLE` lets `CARD` load by Triton, if they have 32 KiB."""
TABLE = (
    Row(ANY_CARD, LOAD, 1, 1, DMA, "a rule"),
    Row(ANY_CARD, STORE, 1, 1, DMA, "a rule"),
    Row(CARD, LOAD, NBYTES, FEW, TRITON, "figures"),
    Row(CARD, LOAD, 2 * NBYTES, 1, DMA, "figures"),
)


class Engines:
    """In place of both engines, which a CPU has not."""

    def __init__(self) -> None:
        self.built: list[Engine] = []
        self.batched: list[bool] = []
        self.cuts: list[Sequence[int]] = []
        self.api = Memmove()

    def open_runtime(self, *, batch: bool) -> Memmove:
        self.batched.append(batch)
        return self.api

    def dma(self, *args: Any, cuts: Sequence[int], **options: Any) -> DmaBlockCopier:
        self.built.append(DMA)
        self.cuts.append(cuts)
        return DmaBlockCopier(*args, cuts=cuts, **options)

    def triton(self, sources: Any, targets: Any, device: Any) -> BlockCopier:
        self.built.append(TRITON)
        return BlockCopier(sources, targets)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    found = Engines()
    monkeypatch.setattr(transfer, "open_runtime", found.open_runtime)
    monkeypatch.setattr(transfer, "DmaBlockCopier", found.dma)
    monkeypatch.setattr(transfer, "_triton_copier", found.triton)
    return found


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Questions to the table, which is `TABLE`."""
    asked: list[tuple] = []

    def choose(*question: Any) -> Engine:
        asked.append(question)
        return choice.choose(*question, table=TABLE)

    monkeypatch.setattr(transfer, "choose", choose)
    return asked


Make = Callable[..., TransferCopier]


@pytest.fixture
def memory() -> SimpleNamespace:
    """Two layers on the "device", slots of both on the host."""
    device = torch.randint(0, 256, (2, BLOCKS, NBYTES), dtype=torch.uint8)
    host = torch.randint(0, 256, (BLOCKS, 2, NBYTES), dtype=torch.uint8)
    return SimpleNamespace(
        device=device,
        host=host,
        layers=[Region(layer.data_ptr(), NBYTES, NBYTES, BLOCKS) for layer in device],
        slots=staging_regions(host.data_ptr(), [NBYTES, NBYTES], BLOCKS),
    )


@pytest.fixture
def make(memory: SimpleNamespace, engines: Engines, looked_up: list[tuple]) -> Make:
    def copier(
        direction: Direction, *, pinned: bool = True, **options: Any
    ) -> TransferCopier:
        return TransferCopier(
            memory.layers,
            memory.slots,
            direction,
            torch.device("cpu"),
            pinned,
            **{"card": CARD, **options},
        )

    return copier


@pytest.mark.parametrize(
    ("direction", "ids", "engine"),
    [
        (LOAD, FEW // 2 - 1, DMA),
        (LOAD, FEW // 2, TRITON),
        (LOAD, BLOCKS, TRITON),
        (STORE, 1, DMA),
        (STORE, BLOCKS, DMA),
    ],
)
def test_a_job_moves_its_bytes_by_the_engine_of_the_table(
    make: Make,
    memory: SimpleNamespace,
    engines: Engines,
    direction: Direction,
    ids: int,
    engine: Engine,
) -> None:
    copier = make(direction)
    assert copier.last_engine is None
    assert engines.built == []
    sources, targets = list(range(ids)), list(range(BLOCKS - ids, BLOCKS))[::-1]
    device, host = memory.device.clone(), memory.host.clone()
    assert copier.copy(sources, targets) == ids * 2 * NBYTES == ids * copier.block_bytes
    assert copier.last_engine is engine
    assert engines.built == [engine]
    if direction is LOAD:
        device[:, targets] = host[sources].transpose(0, 1)
    else:
        host[targets] = device[:, sources].transpose(0, 1)
    assert torch.equal(memory.device, device)
    assert torch.equal(memory.host, host)


def test_engines_are_built_once_and_choices_looked_up_once(
    make: Make, engines: Engines, looked_up: list[tuple]
) -> None:
    copier = make(LOAD)
    for count in (1, 5, 1, 5, 6, 1):
        copier.copy(range(count), range(count))
    assert engines.built == [DMA, TRITON]
    assert looked_up == [(CARD, LOAD, NBYTES, 2 * count) for count in (1, 5, 6)]
    assert engines.batched == [True]


def test_warm_up_builds_what_jobs_may_want(make: Make, engines: Engines) -> None:
    copier = make(LOAD)
    copier.warm_up()
    assert engines.built == [DMA, TRITON]
    copier.copy(range(8), range(8))
    assert engines.built == [DMA, TRITON]


def test_neighbours_are_one_larger_piece(
    memory: SimpleNamespace, make: Make, looked_up: list[tuple]
) -> None:
    """Pools of slots on both sides: a block is one run."""
    pool = torch.zeros(BLOCKS, 2, NBYTES, dtype=torch.uint8)
    memory.layers = staging_regions(pool.data_ptr(), [NBYTES, NBYTES], BLOCKS)
    copier = make(LOAD)
    copier.copy([3, 4, 5, 6, 9], [0, 1, 2, 3, 4])
    assert looked_up == [(CARD, LOAD, 2 * NBYTES, 5)]
    assert copier.last_engine is DMA


def test_no_ids(make: Make, engines: Engines, looked_up: list[tuple]) -> None:
    assert make(LOAD).copy([], []) == 0
    assert looked_up == []
    assert engines.api.calls == []


def test_memory_that_is_not_pinned_goes_by_dma_one_by_one(
    make: Make,
    engines: Engines,
    looked_up: list[tuple],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "vllm.kvplugin.kernels"):
        copier = make(LOAD, pinned=False)
        copier.warm_up()
        copier.copy(range(8), range(8))
        copier.copy(range(8), range(8))
    assert copier.last_engine is DMA
    assert engines.built == [DMA]
    assert engines.batched == [False]
    assert looked_up == []
    [record] = caplog.records
    assert "not pinned: each load of KV blocks waits on the host" in record.message


def test_cuts_reach_the_copy_engine(
    make: Make, memory: SimpleNamespace, engines: Engines
) -> None:
    cut = memory.slots[0].address + 4 * NBYTES
    make(STORE, cuts=[cut]).copy([0], [0])
    assert engines.cuts == [[cut]]


@pytest.mark.parametrize("ids", [1, BLOCKS])
def test_ids_on_a_device_are_refused_by_either_engine(make: Make, ids: int) -> None:
    away = torch.arange(ids, device="meta")
    with pytest.raises(ValueError, match="must be in host memory, not on meta"):
        make(LOAD).copy(away, away)


@pytest.mark.parametrize("ids", [[0, 0], [0] * 8])
def test_bad_ids_copy_nothing(
    make: Make, memory: SimpleNamespace, ids: list[int]
) -> None:
    before = memory.device.clone()
    with pytest.raises(ValueError, match="target id 0 appears more than once"):
        make(LOAD).copy(ids, ids)
    assert torch.equal(memory.device, before)


def test_sides_must_pair_up(make: Make, memory: SimpleNamespace) -> None:
    memory.layers = memory.layers[:1]
    with pytest.raises(ValueError, match="2 source regions do not pair with 1"):
        make(LOAD)


def test_the_card_is_asked_for_its_name(
    make: Make, looked_up: list[tuple], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"its {device}")
    make(STORE, card=None).copy([0], [0])
    assert looked_up == [("its cpu", STORE, NBYTES, 2)]


def test_the_kernel_is_that_of_the_gpu(
    monkeypatch: pytest.MonkeyPatch, memory: SimpleNamespace
) -> None:
    pytest.importorskip("triton")
    from kvplugin.kernels import copy

    built: list[tuple] = []
    monkeypatch.setattr(copy, "DeviceBlockCopier", lambda *args: built.append(args))
    monkeypatch.setattr(transfer, "_dma_copier", lambda *args: None)
    device = torch.device("cuda", 1)
    TransferCopier(memory.layers, memory.slots, LOAD, device, True, CARD).warm_up()
    assert built == [(memory.slots, memory.layers, device)]
