"""Real bytes through host memory and back, whatever the layout of a block."""

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplugin.connectors.offload import host_copies
from kvplugin.connectors.offload.config import OffloadConfig
from kvplugin.connectors.offload.host_copies import HostCopies
from kvplugin.connectors.offload.messages import HostPool, Report
from kvplugin.connectors.offload.worker import OffloadWorker
from kvplugin.contract import CopyJob, EngineInfo, GroupInfo, KVTensor
from kvplugin.errors import (
    ConfigError,
    IntegrityError,
    LayoutMismatchError,
    TransferError,
)
from kvplugin.kernels.host import BlockCopier
from kvplugin.wire import decode
from tests.offload.layers import BLOCKS, Layer, group_of, noise, tensors_of
from tests.offload.plans import order, plan

HOST_BLOCKS = 5
HANG_SECONDS = 60.0
"""Nothing here takes a thousandth of it."""
ONE_POOL = [HostPool([0], HOST_BLOCKS)]


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


def copies_of(*groups: list[Layer], pools: list[HostPool] = ONE_POOL) -> HostCopies:
    for layer in (layer for layers in groups for layer in layers):
        layer.remember()
    tensors: dict[str, KVTensor] = {}
    for index, layers in enumerate(groups):
        tensors |= tensors_of(layers, index)
    copies = HostCopies([group_of(g, i) for i, g in enumerate(groups)], tensors)
    copies.allocate(pools)
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


class TestPools:
    """Several groups: each pool has memory and a size of its own."""

    small = Layer(noise(BLOCKS, 10, seed=1))
    large = Layer(noise(BLOCKS, 90, seed=2))

    @pytest.mark.parametrize(
        "pools",
        [
            [HostPool([0, 1], HOST_BLOCKS)],
            [HostPool([0], HOST_BLOCKS), HostPool([1], HOST_BLOCKS)],
            [HostPool([1], HOST_BLOCKS), HostPool([0], 2)],
        ],
        ids=["shared", "apart", "of unequal sizes"],
    )
    def test_groups_keep_their_blocks_apart(self, pools: list[HostPool]) -> None:
        copies = copies_of([self.small], [self.large], pools=pools)
        parts = [(0, [0, 1], [0, 1]), (1, [0, 1], [2, 3])]
        assert copies.execute(CopyJob(1, store=True, parts=parts)) == 2 * (10 + 90)
        parts = [(1, [6, 7], [2, 3]), (0, [6, 7], [1, 0])]
        copies.execute(CopyJob(2, store=False, parts=parts))
        assert np.array_equal(self.small.now(6), self.small.was(1))
        assert np.array_equal(self.small.now(7), self.small.was(0))
        assert np.array_equal(self.large.now(6), self.large.was(0))
        assert np.array_equal(self.large.now(7), self.large.was(1))
        copies.close()

    def test_the_same_host_id_in_two_pools_is_two_places(self) -> None:
        pools = [HostPool([0], HOST_BLOCKS), HostPool([1], HOST_BLOCKS)]
        copies = copies_of([self.small], [self.large], pools=pools)
        parts = [(0, [1], [3]), (1, [2], [3])]
        copies.execute(CopyJob(1, store=True, parts=parts))
        parts = [(0, [5], [3]), (1, [5], [3])]
        copies.execute(CopyJob(2, store=False, parts=parts))
        assert np.array_equal(self.small.now(5), self.small.was(1))
        assert np.array_equal(self.large.now(5), self.large.was(2))
        copies.close()

    def test_memory_is_what_each_pool_needs(self) -> None:
        pools = [HostPool([0], 7), HostPool([1], 3)]
        copies = copies_of([self.small], [self.large], pools=pools)
        assert copies.allocate(pools) == 7 * 10 + 3 * 90
        assert copies.allocate([HostPool([0, 1], 4)]) == 4 * 90
        copies.close()

    def test_ids_end_where_their_own_pool_ends(self) -> None:
        pools = [HostPool([0], 7), HostPool([1], 3)]
        copies = copies_of([self.small], [self.large], pools=pools)
        assert copies.execute(CopyJob(1, True, [(0, [1], [6])])) == 10
        with pytest.raises(ValueError, match="3 is out of range"):
            copies.execute(CopyJob(2, True, [(1, [1], [3])]))
        copies.close()

    @pytest.mark.parametrize(
        "pools",
        [
            [HostPool([0, 2], 4), HostPool([1], 4)],
            [HostPool([0, 1], 4), HostPool([1], 4)],
        ],
        ids=["of an unknown group", "of a group twice"],
    )
    def test_pools_of_other_groups_are_a_defect(self, pools: list[HostPool]) -> None:
        copies = HostCopies([group_of([self.small])], tensors_of([self.small]))
        with pytest.raises(IntegrityError, match="do not fit an engine that offloads"):
            copies.allocate(pools)

    def test_groups_that_overlay_the_same_bytes_are_copied_each_by_its_ids(
        self,
    ) -> None:
        """As in vLLM's hybrid models: ids are unique over groups, memory is not."""
        memory = noise(BLOCKS, 64)
        attention, states = Layer(memory), Layer(memory[:, :40], page_bytes=64)
        pools = [HostPool([0], 4), HostPool([1], 4)]
        copies = copies_of([attention], [states], pools=pools)
        parts = [(0, [1, 2], [0, 1]), (1, [3], [0])]
        assert copies.execute(CopyJob(1, True, parts)) == 2 * 64 + 40
        parts = [(0, [5, 6], [0, 1]), (1, [7], [0])]
        copies.execute(CopyJob(2, False, parts))
        assert np.array_equal(attention.now(5), attention.was(1))
        assert np.array_equal(attention.now(6), attention.was(2))
        assert np.array_equal(states.now(7), states.was(3))
        assert np.array_equal(memory[7, 40:], attention.was(7)[0, 40:])
        copies.close()

    def test_a_state_page_moves_without_its_padding(self) -> None:
        """Qwen3-Next's: 70,144 of 131,072 bytes."""
        pages = noise(BLOCKS, 131_072)
        state = Layer(pages[:, :70_144], page_bytes=131_072)
        copies = copies_of([state])
        assert copies.execute(store([3], [0])) == 70_144
        copies.execute(load([4], [0]))
        assert np.array_equal(state.now(4), state.was(3))
        copies.close()

    def test_a_group_that_is_not_reusable_is_left_alone(self) -> None:
        scratch = group_of([], index=1, reusable=False)
        copies = HostCopies([group_of([self.small]), scratch], tensors_of([self.small]))
        copies.allocate(ONE_POOL)
        with pytest.raises(ValueError, match="group 1 is not offloaded"):
            copies.execute(CopyJob(1, True, [(1, [1], [0])]))
        copies.close()

    def test_a_group_whose_layers_are_on_other_ranks_needs_no_copy(self) -> None:
        pools = [HostPool([0], 4), HostPool([1], 4)]
        copies = copies_of([self.small], [], pools=pools)
        parts = [(1, [3], [2]), (0, [1], [2])]
        assert copies.execute(CopyJob(1, True, parts)) == 10
        assert copies.execute(CopyJob(2, False, [(1, [3], [2])])) == 0
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


def test_closing_twice_is_closing_once() -> None:
    copies = copies_of([Layer(noise(BLOCKS, 50))])
    copies.close()
    copies.close()


def test_a_copy_after_the_end_is_refused() -> None:
    copies = copies_of([Layer(noise(BLOCKS, 50))])
    copies.close()
    with pytest.raises(ValueError, match="there is no host memory"):
        copies.execute(store([1], [0]))


def test_memory_of_a_copy_that_does_not_end_stays_mapped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    class Hanging(BlockCopier):
        def copy(self, *ids: Any) -> int:
            begun.set()
            assert go_on.wait(HANG_SECONDS)
            return super().copy(*ids)

    monkeypatch.setattr(host_copies, "block_copier", Hanging)
    layer = Layer(noise(BLOCKS, 50))
    copies = copies_of([layer])
    thread = threading.Thread(target=copies.execute, args=(load([3], [1]),))
    thread.start()
    assert begun.wait(HANG_SECONDS)
    copies.close()
    assert "1 copies do not end" in caplog.text
    go_on.set()  # into memory that is gone this would end the process
    thread.join(HANG_SECONDS)
    assert (layer.now(3) == 0).all()


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


class TestWorker:
    """The worker half over real memory and its own copy thread."""

    @staticmethod
    def engine(*groups: GroupInfo) -> EngineInfo:
        return EngineInfo("engine", groups, BLOCKS, hash_block_size=16)

    def worker(self, layers: list[Layer]) -> OffloadWorker:
        for layer in layers:
            layer.remember()
        self.info = self.engine(group_of(layers))
        # Long enough for every copy to end within the step that started it.
        config = OffloadConfig(cpu_bytes_to_use=1 << 20, copy_wait_ms=60_000)
        worker = OffloadWorker(self.info, config)
        worker.register(tensors_of(layers))
        return worker

    def test_what_a_step_stores_a_later_step_loads(self) -> None:
        layers = LAYOUTS["three layers of different sizes"]
        worker = self.worker(layers)
        stores = [order(1, [2, 1], [3, 2])]
        worker.begin_step(plan(self.info, 1, ONE_POOL, stores=stores))
        worker.end_step()
        report = decode(worker.poll().report, Report)
        (done,) = report.completions
        assert (report.step, done.id, done.error) == (1, 1, "")
        assert done.nbytes == 2 * sum(layer.was(0).nbytes for layer in layers)
        worker.begin_step(plan(self.info, 2, ONE_POOL, loads=[order(2, [5], [2])]))
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
        worker.begin_step(plan(self.info, 1, ONE_POOL, stores=[order(1, [3], [0])]))
        layer.view[3] = 42
        worker.end_step()
        worker.poll()
        worker.begin_step(plan(self.info, 2, ONE_POOL, loads=[order(2, [6], [0])]))
        worker.poll()
        assert (layer.now(6) == 42).all()
        worker.close()

    def test_a_job_that_cannot_be_copied_fails_and_the_next_one_does_not(self) -> None:
        layer = Layer(noise(BLOCKS, 50))
        worker = self.worker([layer])
        loads = [order(1, [99], [0]), order(2, [1], [1])]
        worker.begin_step(plan(self.info, 1, ONE_POOL, loads=loads))
        worker.end_step()
        outcome = worker.poll()
        assert outcome.finished_loads == {"r1", "r2"}
        assert outcome.failed_loads == {"r1": [99]}
        worker.close()

    def test_a_plan_of_more_blocks_makes_room_before_the_first_job(self) -> None:
        """A pipeline's other rank has smaller blocks, so more of them fit."""
        layer = Layer(noise(BLOCKS, 50))
        worker = self.worker([layer])
        many = [HostPool([0], 100_000)]
        stores = [order(1, [3], [99_999])]
        worker.begin_step(plan(self.info, 1, many, stores=stores))
        worker.end_step()
        (done,) = decode(worker.poll().report, Report).completions
        assert done.error == ""
        worker.close()

    def test_a_plan_of_more_memory_than_there_is_fails_its_orders(self) -> None:
        worker = self.worker([Layer(noise(BLOCKS, 50))])
        many = [HostPool([0], 1 << 60)]
        for step in (1, 2):
            stores = [order(step, [3], [0])]
            worker.begin_step(plan(self.info, step, many, stores=stores))
            worker.end_step()
            (done,) = decode(worker.poll().report, Report).completions
            assert "lower cpu_bytes_to_use" in done.error
        worker.close()

    def test_layers_without_a_tensor_are_named(self) -> None:
        layers = LAYOUTS["one layer"]
        engine = self.engine(group_of(layers))
        worker = OffloadWorker(engine, OffloadConfig(cpu_bytes_to_use=1 << 20))
        with pytest.raises(LayoutMismatchError, match=r"no KV tensor.*'0\.0'.*'other'"):
            worker.register({"other": layers[0].tensor})

    def test_layers_of_a_group_that_is_not_reusable_need_no_tensor(self) -> None:
        layers = LAYOUTS["one layer"]
        scratch = group_of(layers, index=1, reusable=False)
        engine = self.engine(group_of(layers), scratch)
        worker = OffloadWorker(engine, OffloadConfig(cpu_bytes_to_use=1 << 20))
        worker.register(tensors_of(layers))
        worker.close()

    def test_memory_of_an_unknown_device_is_refused_by_name(self) -> None:
        layers = LAYOUTS["one layer"]
        engine = self.engine(group_of(layers))
        worker = OffloadWorker(engine, OffloadConfig(cpu_bytes_to_use=1 << 20))
        there = {
            name: replace(t, device="xpu:0") for name, t in tensors_of(layers).items()
        }
        with pytest.raises(ConfigError, match="in memory of 'xpu:0'"):
            worker.register(there)

    def test_tensors_on_several_devices_are_refused_by_name(self) -> None:
        layers = LAYOUTS["three layers of different sizes"]
        engine = self.engine(group_of(layers))
        worker = OffloadWorker(engine, OffloadConfig(cpu_bytes_to_use=1 << 20))
        tensors = tensors_of(layers)
        tensors["0.1"] = replace(tensors["0.1"], device="cuda:1")
        with pytest.raises(LayoutMismatchError, match="are on cpu, cuda:1"):
            worker.register(tensors)

    def test_a_plan_before_the_tensors_is_a_defect(self) -> None:
        engine = self.engine(group_of(LAYOUTS["one layer"]))
        worker = OffloadWorker(engine, OffloadConfig(cpu_bytes_to_use=1 << 20))
        with pytest.raises(TransferError, match="before the KV tensors"):
            worker.begin_step(plan(engine, 1, ONE_POOL))
