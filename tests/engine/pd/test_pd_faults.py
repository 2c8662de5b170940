"""Engines that die, hang, or come back as another one, while prompts change hands.

Every request ends with the right text, in bounded time, and blocks come back.
"""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine import asking
from tests.engine.asking import assert_close
from tests.engine.host import EngineHost
from tests.engine.pd import faults, handing
from tests.engine.pd.hosts import Engines, counted, ours
from tests.engine.prompts import tokens
from tests.ports import free_port

NOISE = 0.02
READING = "WAITING_FOR_REMOTE_KVS"
PATIENCE = 100.0
"""Seconds in which whatever was wrong must be over: ten times the longest deadline."""


class Producers:
    """Engines that prefill, and are there to die."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._living: EngineHost | None = None

    def start(self, port: int | None = None) -> EngineHost:
        """One more."""
        return self._engines.start(ours("producer", port, kv_lease_duration=10.0))

    def living(self) -> EngineHost:
        """The same one until a test kills it."""
        if self._living is None:
            self._living = self.start()
        return self._living

    def kill(self, host: EngineHost) -> None:
        os.kill(host.pid, signal.SIGKILL)
        if host is self._living:
            self._living = None


@pytest.fixture(scope="module")
def consumer(tiny_engines: Engines) -> EngineHost:
    """It goes on only when it is asked to, so that it can be halted anywhere."""
    return tiny_engines.start(
        ours("consumer", handshake_timeout_s=2.0, dead_peer_ttl_s=3.0),
        block_size=128,
        steps=False,
        prepare=faults.reads_can_be_watched,
    )


@pytest.fixture(scope="module")
def producers(
    llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Producers]:
    engines = Engines(
        tmp_path_factory.mktemp("producers"),
        model=str(llama),
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=4 << 20,
        block_size=64,
        max_model_len=1024,
    )
    yield Producers(engines)
    engines.close()


class Case:
    """A prompt, and what the consumer answers alone."""

    def __init__(self, consumer: EngineHost, seed: str, length: int = 700) -> None:
        self.consumer = consumer
        self.prompt = tokens(f"faults {seed}", length)
        self.expected = consumer.run(asking.ask_one, self.prompt)
        assert consumer.run(asking.reset)
        self.begun = time.monotonic()

    def ends_well(self, answer: asking.Answer) -> None:
        assert time.monotonic() - self.begun < PATIENCE
        assert answer.finish_reason == "length"
        assert_close(self.expected, answer, NOISE)
        assert not any(self.consumer.run(handing.settle).values())

    def decode(self, params: handing.Params) -> None:
        (answer,) = self.consumer.run(handing.decode, [self.prompt], [params])
        self.ends_well(answer)


def test_a_producer_dies_before_a_read(consumer, producers):
    producer = producers.living()
    case = Case(consumer, "before")
    (params,) = producer.run(handing.prefill, [case.prompt])
    before = counted(consumer, "reads")
    case.decode(params)
    read = counted(consumer, "reads")
    assert read == before + 1

    case = Case(consumer, "dies before")
    (params,) = producer.run(handing.prefill, [case.prompt])
    producers.kill(producer)
    missed = counted(consumer, "missed_reads")
    case.decode(params)
    assert counted(consumer, "missed_reads") == missed + 1
    assert counted(consumer, "reads") == read


@pytest.mark.full
def test_a_producer_dies_and_another_one_comes_in_its_place(consumer, producers):
    port = free_port()
    producer = producers.start(port)
    case = Case(consumer, "is there")
    (params,) = producer.run(handing.prefill, [case.prompt])
    case.decode(params)
    producers.kill(producer)

    producer = producers.start(port)
    read = counted(consumer, "reads")
    case = Case(consumer, "another")
    (params,) = producer.run(handing.prefill, [case.prompt])
    for _ in range(2):  # once it may still be taken for dead
        case.decode(params)
        assert consumer.run(asking.reset)
        time.sleep(3.0)
        (params,) = producer.run(handing.prefill, [case.prompt])
    assert counted(consumer, "reads") > read
    assert not any(producer.run(handing.settle).values())


@pytest.mark.full
def test_a_producer_dies_during_a_read(consumer, producers):
    producer = producers.living()
    case = Case(consumer, "dies during")
    (params,) = producer.run(handing.prefill, [case.prompt])
    consumer.run(faults.hold_reads, True)
    assert consumer.run(faults.begin, case.prompt, params, READING)
    producers.kill(producer)
    failed = counted(consumer, "failed_reads")
    case.ends_well(consumer.run(faults.finish))
    assert counted(consumer, "failed_reads") == failed + 1


@pytest.mark.full
def test_a_producer_dies_after_a_read(consumer, producers):
    producer = producers.living()
    case = Case(consumer, "dies after")
    (params,) = producer.run(handing.prefill, [case.prompt])
    read = counted(consumer, "reads")
    assert consumer.run(faults.begin, case.prompt, params, "RUNNING")
    producers.kill(producer)
    case.ends_well(consumer.run(faults.finish))
    assert counted(consumer, "reads") == read + 1


@pytest.mark.full
@pytest.mark.parametrize("status", ["WAITING", READING, "RUNNING"])
def test_a_consumer_dies(tiny_engines, producers, status):
    """What it was given comes back to the producer."""
    producer = producers.living()
    doomed = tiny_engines.start(
        ours("consumer"),
        steps=False,
        prepare=faults.reads_can_be_watched,
    )
    prompt = tokens(f"consumer dies {status}", 700)
    (params,) = producer.run(handing.prefill, [prompt])
    doomed.run(faults.hold_reads, status == READING)
    assert doomed.run(faults.begin, prompt, params, status)
    os.kill(doomed.pid, signal.SIGKILL)
    assert not any(producer.run(handing.settle, PATIENCE).values())


@pytest.mark.full
def test_a_producer_is_halted_before_it_has_answered(consumer, producers):
    producer = producers.living()
    case = Case(consumer, "halted")
    (params,) = producer.run(handing.prefill, [case.prompt])
    os.kill(producer.pid, signal.SIGSTOP)
    try:
        case.decode(params)
    finally:
        os.kill(producer.pid, signal.SIGCONT)
    assert not any(producer.run(handing.settle).values())


@pytest.mark.full
def test_a_producer_is_halted_during_a_read(consumer, producers):
    producer = producers.living()
    case = Case(consumer, "halted during")
    (params,) = producer.run(handing.prefill, [case.prompt])
    consumer.run(faults.hold_reads, True)
    assert consumer.run(faults.begin, case.prompt, params, READING)
    os.kill(producer.pid, signal.SIGSTOP)
    try:
        case.ends_well(consumer.run(faults.finish))
    finally:
        os.kill(producer.pid, signal.SIGCONT)
    assert not any(producer.run(handing.settle).values())


def test_what_is_read_after_the_lease_is_thrown_away(consumer, producers):
    """Scenario: the consumer is halted for longer than the lease lasts, and the
    producer has used the blocks again."""
    producer = producers.living()
    case = Case(consumer, "too late")
    (params,) = producer.run(handing.prefill, [case.prompt])
    consumer.run(faults.hold_reads, True)
    assert consumer.run(faults.begin, case.prompt, params, READING)
    os.kill(consumer.pid, signal.SIGSTOP)
    try:
        assert not any(producer.run(handing.settle).values())
        others = [tokens(f"faults other {i}", 900) for i in range(20)]
        producer.run(asking.ask, others, 1)
    finally:
        os.kill(consumer.pid, signal.SIGCONT)
    discarded = counted(consumer, "discarded_reads")
    case.ends_well(consumer.run(faults.finish))
    assert counted(consumer, "discarded_reads") == discarded + 1


@pytest.mark.full
def test_two_producers_serve_one_consumer(consumer, producers):
    both = [producers.living(), producers.start()]
    prompts = [tokens(f"faults two {i}", 200 + 50 * i) for i in range(8)]
    expected = consumer.run(asking.ask, prompts)
    assert consumer.run(asking.reset)
    read = counted(consumer, "reads")
    params = [
        both[i % 2].run(handing.prefill, [prompt])[0]
        for i, prompt in enumerate(prompts)
    ]
    answers = consumer.run(handing.decode, prompts, params)
    for answer, other in zip(answers, expected, strict=True):
        assert_close(other, answer, NOISE)
    assert counted(consumer, "reads") == read + len(prompts)
    for host in (consumer, *both):
        assert not any(host.run(handing.settle).values())


@pytest.mark.full
def test_requests_that_read_are_preempted(tiny_engines, producers):
    """Three of nine blocks each fit into the consumer's 30; three of eleven do not."""
    producer = producers.living()
    consumer = tiny_engines.start(
        ours("consumer"),
        block_size=32,
        kv_cache_memory_bytes=31 * 32 * 2048,
        max_model_len=512,
    )
    prompts = [tokens(f"faults preempted {i}", 260) for i in range(4)]
    expected = [consumer.run(asking.ask_one, prompt, 90) for prompt in prompts]
    assert consumer.run(asking.reset)
    params = producer.run(handing.prefill, prompts)
    answers = consumer.run(handing.decode, prompts, params, 90)
    assert consumer.run(asking.preemptions) > 0
    assert counted(consumer, "reads") == len(prompts)
    for answer, other in zip(answers, expected, strict=True):
        assert_close(other, answer, NOISE)
    for host in (consumer, producer):
        assert not any(host.run(handing.settle).values())
    consumer.close()
