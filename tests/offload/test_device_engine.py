"""The whole connector beside a simulated GPU: steps are launched, and run when their
stream comes to it; the host only knows what events have told it."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from kvplugin.connectors.offload.config import OffloadConfig
from kvplugin.connectors.offload.stream_transport import StreamTransport
from kvplugin.connectors.offload.worker import OffloadWorker
from kvplugin.contract import CopyJob, Lookup, WorkerOutcome
from kvplugin.kernels.streams import CopyStreams, Keep
from tests.kernels.fake_streams import FakeStreams, Place
from tests.kernels.test_streams_traffic import (
    EndsTooEarly,
    LoadsDoNotWait,
    StoresDoNotWait,
)
from tests.offload.content import BLOCK_BYTES, RankMemory
from tests.offload.engine_model import Engine
from tests.offload.jobs import blocks_of
from tests.offload.rows import Work
from tests.offload.setup_model import Setup, prompt


class GpuEngine(Engine):
    """Its forward, the loss of a block's old content and the connector's copies are
    work on streams, one device a rank.

    Args:
        loads_first: whether loads start before the forward, as in vLLM 0.19, or behind
            it.
        streams: the kind of device.
    """

    def __init__(
        self,
        setup: Setup,
        *,
        loads_first: bool,
        host_blocks: int = 16,
        streams: type[FakeStreams] = FakeStreams,
        **changes: Any,
    ) -> None:
        super().__init__(setup, host_blocks=host_blocks, copy_wait_ms=0, **changes)
        self.loads_first = loads_first
        self.gpus = [streams() for _ in self.memories]
        config = OffloadConfig(
            cpu_bytes_to_use=host_blocks * BLOCK_BYTES * setup.ranks,
            copy_wait_ms=0,
            **changes,
        )
        for memory, gpu in zip(self.memories, self.gpus, strict=True):
            memory.poison = self._poisoning(memory, gpu)  # type: ignore[method-assign]
        self.workers = [
            OffloadWorker(setup.info(rank), config, self._over(rank))
            for rank in range(setup.ranks)
        ]

    def _poisoning(
        self, memory: RankMemory, gpu: FakeStreams
    ) -> Callable[[Iterable[int]], None]:
        poison = memory.poison

        def later(ids: Iterable[int]) -> None:
            blocks = list(ids)
            gpu.launch("change of hands", runs=lambda: poison(blocks))

        return later

    def _over(self, rank: int) -> Callable[[Any], StreamTransport]:
        gpu, memory = self.gpus[rank], self.memories[rank]

        def launch(job: CopyJob, keep: Keep) -> int:
            del keep
            device = [("device", block) for block in blocks_of(job)]
            host = [("host", block) for _, _, ids in job.parts for block in ids]
            reads, writes = (device, host) if job.store else (host, device)
            gpu.launch(
                f"copy {job.id}",
                reads=reads,
                writes=[(place, None) for place in writes],
                runs=lambda: memory.execute(job),
            )
            return BLOCK_BYTES * len(device)

        return lambda pools: StreamTransport(CopyStreams(gpu, in_flight=2), launch)

    def _execute(self, rank: int, plan: bytes, work: Sequence[Work]) -> WorkerOutcome:
        worker = self.workers[rank]
        if self.loads_first:
            worker.begin_step(plan)
            self._forward(rank, work)
        else:
            self._forward(rank, work)
            worker.begin_step(plan)
        worker.end_step()
        return worker.poll()

    def _forward(self, rank: int, work: Sequence[Work]) -> None:
        memory, size = self.memories[rank], self.setup.block_size
        items = [(list(w.request.row), list(w.histories), w.start) for w in work]
        used: list[Place] = []
        written: list[tuple[Place, object]] = []
        for row, histories, start in items:
            last = -(-len(histories) // size)
            used += [("device", block) for block in row[:last]]
            written += [(("device", b), None) for b in row[start // size : last]]

        def run() -> None:
            for row, histories, start in items:
                memory.write(row, histories, start)
            for row, histories, _ in items:
                memory.read(row, histories)

        self.gpus[rank].launch("step", reads=used, writes=written, runs=run)

    def progress(self, number: int, works: int) -> None:
        """Let a stream of every device run so many works. Those of copies are there
        from the first plan on."""
        for gpu in self.gpus:
            for stream in gpu.streams[number : number + 1] * works:
                gpu.step(stream)

    def finish(self) -> None:
        """Until nothing is left to do."""
        for _ in range(200):
            if not self.has_work():
                break
            self.step()
            for gpu in self.gpus:
                gpu.run_all()
        for gpu in self.gpus:
            gpu.run_all()
            assert not gpu.races
        self.check_idle()


@pytest.mark.parametrize("loads_first", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_was_stored_is_loaded(ranks: int, loads_first: bool) -> None:
    engine = GpuEngine(Setup(ranks=ranks), loads_first=loads_first)
    engine.add(prompt(16))
    engine.finish()
    engine.forget_local()
    assert engine.offered(prompt(16)) == Lookup(16)
    engine.add(prompt(24), max_new_tokens=4)
    engine.finish()
    assert engine.totals.counters["loaded_blocks"] == 4
    assert engine.totals.counters["failed_loads"] == 0


programs = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 2), st.integers(5, 30)),
        st.tuples(st.just("step"), st.integers(1, 3), st.just(0)),
        st.tuples(st.just("run"), st.integers(0, 2), st.integers(1, 6)),
        st.tuples(st.just("forget"), st.just(0), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=100, deadline=None)
@given(programs, st.booleans())
def test_whatever_the_streams_do_nothing_is_read_that_is_not_there(
    program: list[tuple[str, int, int]], loads_first: bool
) -> None:
    """A small pool and a small host memory: blocks change hands all the time."""
    engine = played(program, loads_first)
    assert engine.totals.counters["failed_loads"] == 0
    assert engine.totals.counters["failed_stores"] == 0


def played(
    program: Iterable[tuple[str, int, int]],
    loads_first: bool,
    streams: type[FakeStreams] = FakeStreams,
) -> GpuEngine:
    """An engine after a program, at rest."""
    setup = Setup(usable_blocks=14, token_budget=12)
    engine = GpuEngine(setup, loads_first=loads_first, host_blocks=10, streams=streams)
    for name, one, two in program:
        if name == "add":
            engine.add(prompt(two, seed=one), max_new_tokens=1 + two % 4)
        elif name == "step":
            engine.steps(one)
        elif name == "run":
            engine.progress(one, two)
        else:
            engine.forget_local()
    engine.finish()
    return engine


@pytest.mark.parametrize("mutated", [LoadsDoNotWait, StoresDoNotWait, EndsTooEarly])
def test_copies_that_do_not_wait_are_found_out(mutated: type[FakeStreams]) -> None:
    def goes_wrong(program: list[tuple[str, int, int]]) -> bool:
        try:
            played(program, True, mutated)
        except AssertionError:
            return True
        return False

    find(
        programs,
        goes_wrong,
        settings=settings(
            max_examples=2000, deadline=None, phases=[Phase.generate], database=None
        ),
    )
