"""The worker half beside a device: real bytes over simulated streams."""

import functools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvplugin.connectors.offload import copies, device_copies
from kvplugin.connectors.offload.device_copies import DeviceCopies, cuda_device
from kvplugin.connectors.offload.messages import HostPool, Report
from kvplugin.contract import CopyJob
from kvplugin.errors import CapacityError, ConfigError
from kvplugin.kernels import pinned, transfer
from kvplugin.kernels.region import Region
from kvplugin.kernels.streams import Direction
from kvplugin.kernels.torch_streams import TorchStreams
from kvplugin.wire import decode
from tests.offload.device_bench import Bench, errors, of_all_groups, on_device
from tests.offload.fake_device import FakeGpu
from tests.offload.layers import BLOCKS, Layer, group_of, noise, tensors_of
from tests.offload.plans import order, plan


@pytest.fixture
def bench() -> Bench:
    return Bench()


class TestBytes:
    @pytest.mark.parametrize("loads_first", [True, False])
    def test_blocks_of_all_pools_come_back_whole(
        self, bench: Bench, loads_first: bool
    ) -> None:
        wanted = {(0, 1): 11, (1, 2): 22, (2, 3): 33}
        stores = [of_all_groups(1, [1, 2, 3], [0, 0, 5])]
        assert errors(bench.step(lambda: bench.forward(wanted), stores=stores)) == {}
        assert errors(bench.settle()) == {1: ""}
        kept = [bench.bytes_of(0, 1), bench.bytes_of(1, 2), bench.bytes_of(2, 3)]
        others = [bench.bytes_of(0, 7), bench.bytes_of(1, 7), bench.bytes_of(2, 7)]
        bench.forward({}, [4, 5, 6])  # the last one of who had them before
        bench.step(
            functools.partial(bench.forward, {(0, 7): 7}),
            loads_first=loads_first,
            loads=[of_all_groups(2, [4, 5, 6], [0, 0, 5])],
        )
        outcome = bench.settle()
        assert (outcome.finished_loads, outcome.failed_loads) == ({"r2"}, {})
        found = [bench.bytes_of(0, 4), bench.bytes_of(1, 5), bench.bytes_of(2, 6)]
        assert found == kept
        assert [bench.bytes_of(g, 7) for g in (1, 2)] == others[1:]

    def test_a_store_takes_what_its_own_step_wrote(self, bench: Bench) -> None:
        """The step is launched, not run, when the store is submitted."""
        write = functools.partial(bench.forward, {(0, 1): 42})
        bench.step(write, stores=[order(1, [1], [3])])
        assert errors(bench.settle()) == {1: ""}
        bench.step(loads=[order(2, [5], [3])])
        bench.settle()
        assert set(bench.bytes_of(0, 5)) == {42}

    def test_a_job_is_not_reported_before_its_bytes_are_there(
        self, bench: Bench
    ) -> None:
        before = bench.bytes_of(0, 3)
        bench.step(loads=[order(1, [3], [0])])
        while (side := bench.gpu.streams.streams[1]).queue:
            assert bench.worker.poll().finished_loads == frozenset()
            bench.gpu.streams.run_all([bench.gpu.streams.compute])
            bench.gpu.streams.step(side)
        assert bench.bytes_of(0, 3) != before
        assert bench.worker.poll().finished_loads == {"r1"}

    def test_an_id_out_of_range_fails_its_job_alone(self, bench: Bench) -> None:
        stores = [order(1, [99], [0]), order(2, [3], [1]), order(3, [3], [1], group=7)]
        bench.step(stores=stores)
        found = errors(bench.settle())
        assert "99 is out of range" in found[1]
        assert found[2] == ""
        assert "group 7 is not offloaded" in found[3]

    def test_a_drain_waits_on_the_host_for_stores(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        naps: list[float] = []

        def sleep(seconds: float) -> None:
            naps.append(seconds)
            bench.gpu.streams.run_all()

        bench.step(stores=[order(1, [3], [1])])
        transport = bench.worker._transport
        monkeypatch.setattr(transport, "_sleep", sleep)
        report = decode(bench.worker.drain(), Report)
        assert [done.id for done in report.completions] == [1]
        assert naps


class TestPinnedMemory:
    def test_every_pool_is_pinned_before_copies_are_made(self, bench: Bench) -> None:
        assert len(bench.gpu.driver.pinned) == 2
        assert len(bench.gpu.asked) == 2 * 3
        assert all(is_pinned for _, is_pinned in bench.gpu.asked)

    def test_the_end_unpins_all(self, bench: Bench) -> None:
        bench.worker.close()
        assert bench.gpu.driver.pinned == {}
        bench.worker.close()

    @pytest.mark.parametrize("refused", [1, 2])
    def test_what_cannot_be_pinned_says_what_to_change_and_is_undone(
        self, refused: int
    ) -> None:
        gpu = FakeGpu(refused=refused)
        layers = [[Layer(noise(BLOCKS, 10))], [Layer(noise(BLOCKS, 90))]]
        tensors = tensors_of(layers[0], 0) | tensors_of(layers[1], 1)
        groups = [group_of(each, i) for i, each in enumerate(layers)]
        copies = DeviceCopies(groups, on_device(tensors), gpu.device)
        with pytest.raises(CapacityError, match=r"cannot pin .*cpu_bytes_to_use"):
            copies.allocate([HostPool([0], 4), HostPool([1], 4)])
        assert gpu.driver.pinned == {}
        copies.close()

    def test_nothing_stays_pinned_where_a_copy_engine_cannot_be_built(self) -> None:
        """The engine may go on without offload (`on_start_error`)."""

        def make_copier(*_: Any) -> Any:
            raise ConfigError("no CUDA runtime")

        gpu, layer = FakeGpu(), Layer(noise(BLOCKS, 10))
        device = replace(gpu.device, make_copier=make_copier)
        copies = DeviceCopies([group_of([layer])], tensors_of([layer]), device)
        with pytest.raises(ConfigError, match="no CUDA runtime"):
            copies.allocate([HostPool([0], 4)])
        assert gpu.driver.pinned == {}

    def test_pools_that_are_opened_again_are_pinned_once(self, bench: Bench) -> None:
        larger = [HostPool([0, 2], 100_000), HostPool([1], 100_000)]
        assert all(pool.host_blocks < 100_000 for pool in bench.pools)
        bench.worker.begin_step(plan(bench.info, 1, larger))
        sizes = sorted(bench.gpu.driver.pinned.values())
        assert sizes == [100_000 * 96, 100_000 * 160]

    def test_places_where_pieces_meet_are_told(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            device_copies,
            "PinnedMemory",
            functools.partial(pinned.PinnedMemory, piece_bytes=4096),
        )
        gpu, layer = FakeGpu(), Layer(noise(BLOCKS, 1024))
        copies = DeviceCopies(
            [group_of([layer])], on_device(tensors_of([layer])), gpu.device
        )
        copies.allocate([HostPool([0], 8)])
        assert [len(cuts) for cuts in gpu.cuts] == [1, 1]
        assert gpu.cuts[0][0] in gpu.driver.pinned
        copies.close()

    def test_what_a_hung_copy_may_write_to_stays_pinned(
        self, bench: Bench, caplog: pytest.LogCaptureFixture
    ) -> None:
        bench.step(stores=[order(1, [3], [1])])
        transport: Any = bench.worker._transport
        transport._close_seconds = 0.0
        bench.worker.close()
        assert len(bench.gpu.driver.pinned) == 2
        assert "stay pinned" in caplog.text
        bench.gpu.streams.run_all()  # into memory that is still there

    def test_a_copy_after_the_end_is_refused(self, bench: Bench) -> None:
        bench.copies.close()
        with pytest.raises(ValueError, match="there is no host memory"):
            bench.copies.launch(CopyJob(1, True, [(0, [1], [1])]), lambda _: None)


class TestAStepNeverWaits:
    def test_not_for_copies_whatever_copy_wait_ms_says(self, bench: Bench) -> None:
        """With it a step would hang here: nothing runs."""
        stores = [order(job, [job % 7 + 1], [job % 12]) for job in range(30)]
        outcome = bench.step(lambda: bench.forward({(0, 1): 1}), stores=stores)
        assert errors(outcome) == {}
        assert ("wait", bench.gpu.streams.compute.number) not in bench.gpu.streams.log


class TestTheRealThing:
    """What needs no GPU to be seen of it."""

    def test_tensors_of_a_gpu_are_copied_by_a_device(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked, gpu, layer = [], FakeGpu(), Layer(noise(BLOCKS, 10))

        def device(name: str) -> Any:
            asked.append(name)
            return gpu.device

        monkeypatch.setattr(copies, "cuda_device", device)
        tensors = on_device(tensors_of([layer]))
        found = copies.open_copies([group_of([layer])], tensors)
        assert isinstance(found, DeviceCopies)
        assert asked == ["cuda:0"]

    def test_a_gpu_has_its_own_streams_driver_and_engines(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made: list[Any] = []

        class Copier:
            def __init__(self, *args: Any, **options: Any) -> None:
                made.append((*args, options))

            def warm_up(self) -> None:
                made.append("warm")

        monkeypatch.setattr(torch.cuda, "cudart", SimpleNamespace)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(transfer, "TransferCopier", Copier)
        device = cuda_device("cuda:1")
        assert isinstance(device.streams, TorchStreams)
        assert isinstance(device.registrar, pinned.CudaRegistrar)
        region = [Region(4096, 64, 64, 4)]
        device.make_copier(region, region, Direction.LOAD, [128])
        there = torch.device("cuda", 1)
        (arguments, warm) = made
        assert arguments == (
            region,
            region,
            Direction.LOAD,
            there,
            True,
            {"cuts": [128]},
        )
        assert warm == "warm"

    def test_ids_that_a_kernel_reads_are_sent_from_pinned_memory(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        words = pytest.importorskip("kvplugin.kernels.words")
        calls: list[Any] = []

        def pin(self: torch.Tensor) -> torch.Tensor:
            calls.append("pin")
            return self

        def to(self: torch.Tensor, device: Any, **options: Any) -> torch.Tensor:
            calls.append((str(device), options))
            return self

        monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
        monkeypatch.setattr(torch.Tensor, "to", to)
        words.pairs_on(torch.device("cuda:0"), [3, 1], [0, 2], BLOCKS, BLOCKS)
        assert calls == ["pin", ("cuda:0", {"non_blocking": True})]


def test_noise_is_no_constant() -> None:
    """Else the tests above would see nothing."""
    assert len(np.unique(noise(BLOCKS, 64))) > 50
