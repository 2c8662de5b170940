"""Real bytes through host memory and back, whatever the layout of a block."""

import mmap
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplugin.connectors.offload.config import OffloadConfig
from kvplugin.connectors.offload.host_copies import HostCopies
from kvplugin.connectors.offload.memory import HostMemory, check_machine_memory
from kvplugin.connectors.offload.messages import (
    VERSION,
    BlockPairs,
    CopyOrder,
    Plan,
    Report,
)
from kvplugin.connectors.offload.worker import OffloadWorker
from kvplugin.contract import CopyJob, EngineInfo, GroupInfo, GroupKind, KVTensor
from kvplugin.errors import CapacityError, IntegrityError, LayoutMismatchError
from kvplugin.layout import PageLayout, TensorLayout
from kvplugin.wire import decode, encode

BLOCKS = 8
HOST_BLOCKS = 5


@dataclass
class Layer:
    """One layer's KV memory: a view of some buffer, and where its blocks are."""

    view: npt.NDArray[np.generic]
    axis: int = 0
    """Of the view, which counts blocks or equal parts of blocks."""
    page_bytes: int = 0
    """Of a page with room to spare; 0: the page is what the tensor has."""
    before: npt.NDArray[np.generic] = field(init=False)

    def __post_init__(self) -> None:
        self.remember()

    @property
    def page(self) -> PageLayout:
        nbytes = self.view.size // BLOCKS * self.view.itemsize
        return PageLayout(self.page_bytes or nbytes, BLOCKS, padded=self.page_bytes > 0)

    @property
    def tensor(self) -> KVTensor:
        layout = TensorLayout(
            shape=self.view.shape,
            strides=self.view.strides,
            itemsize=self.view.itemsize,
            dtype=str(self.view.dtype),
            block_axis=self.axis,
        )
        return KVTensor(self.view.ctypes.data, layout)

    def remember(self) -> None:
        """Keep what all blocks hold now."""
        self.before = self.view.copy()

    def was(self, block: int) -> npt.NDArray[np.generic]:
        """What the block held at the last `remember`."""
        return self._part(self.before, block)

    def now(self, block: int) -> npt.NDArray[np.generic]:
        """What the block holds."""
        return self._part(self.view, block)

    def _part(
        self, array: npt.NDArray[np.generic], block: int
    ) -> npt.NDArray[np.generic]:
        parts = array.shape[self.axis] // BLOCKS
        return array.take(range(block * parts, (block + 1) * parts), self.axis)


def noise(*shape: int, dtype: str = "uint8", seed: int = 0) -> npt.NDArray[np.generic]:
    """Memory full of random bits."""
    chance = np.random.default_rng(seed)
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(bytearray(chance.bytes(nbytes)), dtype).reshape(shape)


def block_outermost(layers: int) -> list[Layer]:
    """All layers in one buffer, a block of each beside the next: (B, L, ...)."""
    buffer = noise(BLOCKS, layers, 4, 2, 16, dtype="uint16")
    return [Layer(buffer[:, layer]) for layer in range(layers)]


LAYOUTS = {
    "one layer": [Layer(noise(BLOCKS, 16, 2, 64, dtype="uint16"))],
    "three layers of different sizes": [
        Layer(noise(BLOCKS, 16, 2, 64, dtype="uint16", seed=1)),
        Layer(noise(BLOCKS, 3, 5, seed=2)),
        Layer(noise(BLOCKS, 7, dtype="float32", seed=3)),
    ],
    "keys and values in halves": [Layer(noise(2, BLOCKS, 16, 4, 8), axis=1)],
    "tokens and heads permuted": [
        Layer(noise(BLOCKS, 16, 4, 8, dtype="uint16").transpose(0, 2, 1, 3))
    ],
    "heads outside of blocks": [
        Layer(noise(3, BLOCKS, 16, 8).transpose(1, 0, 2, 3), axis=0)
    ],
    "blocks innermost": [Layer(noise(6, BLOCKS), axis=1)],
    "two kernel blocks a block": [Layer(noise(2 * BLOCKS, 8, 32))],
    "pages with a gap": [Layer(noise(BLOCKS, 100)[:, :70], page_bytes=100)],
    "layers beside each other": block_outermost(3),
    "odd bytes at an odd address": [Layer(noise(BLOCKS * 13 + 1)[1:].reshape(-1, 13))],
}


def group_of(layers: list[Layer], index: int = 0) -> GroupInfo:
    names = {f"{index}.{i}": layer.page for i, layer in enumerate(layers)}
    return GroupInfo(index, GroupKind.FULL, block_size=16, layers=names)


def tensors_of(layers: list[Layer], index: int = 0) -> dict[str, KVTensor]:
    return {f"{index}.{i}": layer.tensor for i, layer in enumerate(layers)}


def copies_of(layers: list[Layer], host_blocks: int = HOST_BLOCKS) -> HostCopies:
    for layer in layers:
        layer.remember()
    copies = HostCopies([group_of(layers)], tensors_of(layers))
    copies.allocate(host_blocks)
    return copies


def store(engine_ids: list[int], host_ids: list[int]) -> CopyJob:
    return CopyJob(1, store=True, parts=[(0, engine_ids, host_ids)])


def load(engine_ids: list[int], host_ids: list[int]) -> CopyJob:
    return CopyJob(2, store=False, parts=[(0, engine_ids, host_ids)])


@pytest.mark.parametrize("name", LAYOUTS)
def test_blocks_come_back_whole_and_nothing_else_is_touched(name: str) -> None:
    layers = LAYOUTS[name]
    copies = copies_of(layers)
    assert copies.execute(store([6, 1, 3], [0, 4, 2])) == sum(
        layer.was(block).nbytes for layer in layers for block in (6, 1, 3)
    )
    copies.execute(load([2, 7, 3], [2, 0, 4]))
    origins = {2: 3, 7: 6, 3: 1}
    for layer in layers:
        for block in range(BLOCKS):
            came_from = origins.get(block, block)
            assert np.array_equal(layer.now(block), layer.was(came_from)), block
    copies.close()


@pytest.mark.parametrize("name", LAYOUTS)
def test_gaps_between_blocks_are_not_copied(name: str) -> None:
    layers = LAYOUTS[name]
    copies = copies_of(layers)
    (moved,) = {copies.execute(store([b], [0])) for b in range(BLOCKS)}
    assert moved == sum(layer.was(0).nbytes for layer in layers)
    copies.close()


def test_memory_between_pages_stays_as_it_was() -> None:
    buffer = noise(BLOCKS, 100)
    gaps = buffer[:, 70:].copy()
    copies = copies_of([Layer(buffer[:, :70], page_bytes=100)])
    copies.execute(store([0, 1, 2], [0, 1, 2]))
    copies.execute(load([5, 6, 7], [0, 1, 2]))
    assert np.array_equal(buffer[:, 70:], gaps)
    copies.close()


def test_layers_that_share_memory_are_copied_once() -> None:
    layer = Layer(noise(BLOCKS, 50))
    copies = copies_of([layer, layer])
    assert copies.execute(store([3], [0])) == 50
    copies.execute(load([4], [0]))
    assert np.array_equal(layer.now(4), layer.was(3))
    copies.close()


def test_groups_keep_their_blocks_apart() -> None:
    small, large = Layer(noise(BLOCKS, 10, seed=1)), Layer(noise(BLOCKS, 90, seed=2))
    copies = HostCopies(
        [group_of([small]), group_of([large], index=1)],
        tensors_of([small]) | tensors_of([large], index=1),
    )
    copies.allocate(HOST_BLOCKS)
    parts = [(0, [0, 1], [0, 1]), (1, [0, 1], [2, 3])]
    assert copies.execute(CopyJob(1, store=True, parts=parts)) == 2 * (10 + 90)
    parts = [(1, [6, 7], [2, 3]), (0, [6, 7], [1, 0])]
    copies.execute(CopyJob(2, store=False, parts=parts))
    assert np.array_equal(small.now(6), small.was(1))
    assert np.array_equal(small.now(7), small.was(0))
    assert np.array_equal(large.now(6), large.was(0))
    assert np.array_equal(large.now(7), large.was(1))
    copies.close()


@pytest.mark.parametrize(
    "job",
    [
        store([BLOCKS], [0]),
        store([-1], [0]),
        store([0], [HOST_BLOCKS]),
        load([0], [-1]),
        load([0, 1], [0]),
    ],
)
def test_ids_out_of_range_are_refused_and_nothing_is_copied(job: CopyJob) -> None:
    layer = Layer(noise(BLOCKS, 50))
    copies = copies_of([layer])
    with pytest.raises(ValueError, match="id"):
        copies.execute(job)
    assert np.array_equal(layer.view, layer.before)
    copies.close()


def test_a_layer_that_is_not_laid_out_as_its_page_promises_is_refused() -> None:
    layer = Layer(noise(BLOCKS, 50), page_bytes=40)
    with pytest.raises(LayoutMismatchError, match="50 bytes in the tensor and 40"):
        HostCopies([group_of([layer])], tensors_of([layer]))


def test_a_group_without_layers_is_refused() -> None:
    with pytest.raises(IntegrityError, match="group 0 has no layers"):
        HostCopies([group_of([])], {})


def test_closing_twice_is_closing_once() -> None:
    copies = copies_of([Layer(noise(BLOCKS, 50))])
    copies.close()
    copies.close()


@settings(max_examples=30, deadline=None)
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
    pairs=st.dictionaries(
        st.integers(0, BLOCKS - 1), st.integers(0, HOST_BLOCKS - 1), min_size=1
    ),
)
def test_any_strided_view_of_blocks_survives_the_round_trip(
    shape: list[int], order: object, pairs: dict[int, int]
) -> None:
    axes = list(range(len(shape) + 1))
    order.shuffle(axes)  # type: ignore[attr-defined]
    view = noise(*[[BLOCKS, *shape][axis] for axis in axes]).transpose(np.argsort(axes))
    layer = Layer(view)
    copies = copies_of([layer])
    by_host = {host: block for block, host in pairs.items()}
    copies.execute(store(list(by_host.values()), list(by_host)))
    view[...] = 0
    copies.execute(load(list(by_host.values()), list(by_host)))
    for block in range(BLOCKS):
        kept = layer.was(block) if block in by_host.values() else 0
        assert (layer.now(block) == kept).all()
    copies.close()


class TestHostMemory:
    def test_it_is_zero_aligned_and_as_large_as_asked_for(self) -> None:
        memory = HostMemory(100_001)
        assert memory.address % mmap.PAGESIZE == 0
        assert len(memory.view) == memory.nbytes == 100_001
        assert not any(memory.view)
        memory.close()

    def test_more_than_the_machine_has_is_refused_with_the_key_to_change(self) -> None:
        for refuse in (HostMemory, check_machine_memory):
            with pytest.raises(CapacityError, match="lower cpu_bytes_to_use"):
                refuse(1 << 60)


class TestWorker:
    """The worker half over real memory and its own copy thread."""

    @staticmethod
    def worker(layers: list[Layer]) -> OffloadWorker:
        for layer in layers:
            layer.remember()
        engine = EngineInfo("engine", (group_of(layers),), BLOCKS, hash_block_size=16)
        # Long enough for every copy to end within the step that started it.
        config = OffloadConfig(cpu_bytes_to_use=1 << 20, copy_wait_ms=60_000)
        worker = OffloadWorker(engine, config)
        worker.register(tensors_of(layers))
        return worker

    @staticmethod
    def plan(step: int, *, loads: list[CopyOrder], stores: list[CopyOrder]) -> bytes:
        return encode(Plan(VERSION, step, HOST_BLOCKS, loads, stores, []))

    @staticmethod
    def order(job: int, engine_ids: list[int], host_ids: list[int]) -> CopyOrder:
        return CopyOrder(job, f"r{job}", [BlockPairs(0, engine_ids, host_ids)])

    def test_what_a_step_stores_a_later_step_loads(self) -> None:
        layers = LAYOUTS["three layers of different sizes"]
        worker = self.worker(layers)
        worker.begin_step(
            self.plan(1, loads=[], stores=[self.order(1, [0, 1], [3, 2])])
        )
        worker.end_step()
        report = decode(worker.poll().report, Report)
        (done,) = report.completions
        assert (report.step, done.id, done.error) == (1, 1, "")
        assert done.nbytes == 2 * sum(layer.was(0).nbytes for layer in layers)
        worker.begin_step(self.plan(2, loads=[self.order(2, [5], [2])], stores=[]))
        worker.end_step()
        outcome = worker.poll()
        assert outcome.finished_loads == {"r2"}
        assert outcome.failed_loads == {}
        for layer in layers:
            assert np.array_equal(layer.now(5), layer.was(1))
        worker.close()

    def test_a_store_reads_what_the_step_has_written(self) -> None:
        layer = Layer(noise(BLOCKS, 50))
        worker = self.worker([layer])
        worker.begin_step(self.plan(1, loads=[], stores=[self.order(1, [3], [0])]))
        layer.view[3] = 42
        worker.end_step()
        worker.poll()
        worker.begin_step(self.plan(2, loads=[self.order(2, [6], [0])], stores=[]))
        worker.poll()
        assert (layer.now(6) == 42).all()
        worker.close()

    def test_a_job_that_cannot_be_copied_fails_and_the_next_one_does_not(self) -> None:
        layer = Layer(noise(BLOCKS, 50))
        worker = self.worker([layer])
        bad, good = self.order(1, [99], [0]), self.order(2, [1], [1])
        worker.begin_step(self.plan(1, loads=[bad, good], stores=[]))
        worker.end_step()
        outcome = worker.poll()
        assert outcome.finished_loads == {"r1", "r2"}
        assert outcome.failed_loads == {"r1": [99]}
        worker.close()

    def test_layers_without_a_tensor_are_named(self) -> None:
        layers = LAYOUTS["one layer"]
        engine = EngineInfo("engine", (group_of(layers),), BLOCKS, hash_block_size=16)
        worker = OffloadWorker(engine, OffloadConfig(cpu_bytes_to_use=1 << 20))
        with pytest.raises(LayoutMismatchError, match=r"no KV tensor.*'0\.0'.*'other'"):
            worker.register({"other": layers[0].tensor})

    def test_a_plan_before_the_tensors_is_a_defect(self) -> None:
        engine = EngineInfo("engine", (group_of([]),), BLOCKS, hash_block_size=16)
        worker = OffloadWorker(engine, OffloadConfig(cpu_bytes_to_use=1 << 20))
        with pytest.raises(IntegrityError, match="before the KV tensors"):
            worker.begin_step(self.plan(1, loads=[], stores=[]))
