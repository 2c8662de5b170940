"""Engines with a drafter poll before they end a step; stores must not be lost."""

from kvplugin.connectors.offload.config import OffloadConfig
from kvplugin.connectors.offload.messages import HostPool, Report
from kvplugin.connectors.offload.worker import OffloadWorker
from kvplugin.testing.transport import FakeTransport
from kvplugin.wire import decode
from tests.offload import plans
from tests.offload.setup_model import Setup


def plan(job: int) -> bytes:
    """A step that stores one block."""
    stores = [plans.order(job, [job + 1], [job])]
    return plans.plan(Setup().info(), job, [HostPool([0], 4)], stores=stores)


def worker_and_transport() -> tuple[OffloadWorker, FakeTransport]:
    transport = FakeTransport(lambda job: 1)
    config = OffloadConfig(cpu_bytes_to_use=1 << 20)
    return OffloadWorker(Setup().info(), config, lambda _: transport), transport


def completed(report: bytes) -> list[int]:
    return [done.id for done in decode(report, Report).completions]


def test_a_store_begins_when_the_step_ends_after_the_poll():
    worker, transport = worker_and_transport()
    worker.begin_step(plan(0))
    assert completed(worker.poll().report) == []
    assert transport.submitted == []
    worker.end_step()
    worker.begin_step(b"")
    assert completed(worker.poll().report) == [0]


def test_a_step_that_begins_ends_the_one_before():
    worker, transport = worker_and_transport()
    worker.begin_step(plan(0))
    worker.poll()
    worker.begin_step(plan(1))
    worker.end_step()
    assert [job.id for job in transport.submitted] == [0, 1]
    assert completed(worker.poll().report) == [0, 1]


def test_drain_includes_stores_of_a_step_that_was_not_ended():
    worker, _ = worker_and_transport()
    worker.begin_step(plan(0))
    worker.poll()
    assert completed(worker.drain()) == [0]
