"""Two scheduler halves over the real side channel; ranks that are simulated."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvplugin.connectors.nixl.config import Role
from kvplugin.contract import Step
from kvplugin.errors import ConfigError
from tests.nixl.lab import Clock, Engine, Network, Request, spec
from tests.ports import free_port

PROMPT = range(100, 400)
SECRET = "a secret that all engines share"  # noqa: S105
PATIENCE_S = 60.0
"""Of the test, for what takes milliseconds."""


class RealClock(Clock):
    def __init__(self) -> None:
        self.now = 0.0  # ahead of the machine's

    def __call__(self) -> float:
        return time.monotonic() + self.now


class RealEngine(Engine):
    def makers(self) -> dict[str, Any]:
        return {}


Make = Callable[..., RealEngine]


@pytest.fixture
def make() -> Iterator[Make]:
    network = Network(RealClock())
    engines: list[RealEngine] = []

    def engine(name: str, role: Role, port: int = 0, **settings: Any) -> RealEngine:
        port = port or free_port()
        settings = {"secret": SECRET, **settings}
        made = spec(name, 16, num_blocks=128)
        engines.append(RealEngine(network, made, role, port, **settings))
        return engines[-1]

    yield engine
    for each in engines:
        each.half.close()


def until(done: Callable[[], object], *engines: Engine) -> None:
    """Step them until it is so."""
    end = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < end, "it does not happen"
        for engine in engines:
            engine.step()
            engine.read_all()
        time.sleep(0.001)


def test_a_prompt_goes_from_engine_to_engine(make: Make) -> None:
    producer, consumer = make("P", Role.PRODUCER), make("D", Role.CONSUMER)
    requests = [
        consumer.add(f"d{i}", PROMPT, producer.prefill(f"p{i}", PROMPT))
        for i in range(4)
    ]
    until(lambda: all(r.computed for r in requests), consumer, producer)
    assert [request.loaded for request in requests] == [len(PROMPT) - 1] * 4
    until(lambda: producer.is_idle and consumer.is_idle, consumer, producer)
    producer.check_idle()
    consumer.check_idle()


def test_a_lease_is_renewed_while_its_request_waits(make: Make) -> None:
    producer = make("P", Role.PRODUCER, kv_lease_duration=0.5)
    consumer = make("D", Role.CONSUMER)
    params = producer.prefill("p", PROMPT)
    request = Request("d", list(PROMPT), params)
    consumer.half.arrived(request)
    until(lambda: consumer.half.lookup(request, 0).tokens, producer)
    first = time.monotonic()
    until(lambda: time.monotonic() > first + 4 * 0.5, producer)
    assert producer.sending
    assert consumer.half.lookup(request, 0).tokens == len(PROMPT) - 1
    consumer.half.finished(request)
    until(lambda: producer.is_idle, producer)
    assert producer.half.take_stats().counters["closed_leases"] == 1  # type: ignore[union-attr]


def test_a_restarted_peer_is_met_again(make: Make) -> None:
    producer, consumer = make("P", Role.PRODUCER), make("D", Role.CONSUMER)
    port = producer.config.side_channel_port
    first = consumer.add("d", PROMPT, producer.prefill("p", PROMPT))
    until(lambda: first.computed, consumer, producer)
    producer.half.close()
    producer.crash()
    consumer.network.clock.now += 2  # a description of the last second stands
    again = make("P", Role.PRODUCER, port)
    second = consumer.add("e", PROMPT, again.prefill("q", PROMPT))
    until(lambda: second.computed, consumer, again)
    assert second.loaded == len(PROMPT) - 1


def test_another_secret_is_refused_and_both_go_on(make: Make) -> None:
    producer = make("P", Role.PRODUCER, secret=SECRET[::-1])
    consumer = make("D", Role.CONSUMER)
    request = consumer.add("d", PROMPT, producer.prefill("p", PROMPT))
    until(lambda: request.computed, consumer, producer)
    assert request.loaded == 0
    assert "refused" in str(consumer.half._health().peers)


def test_a_port_that_is_taken_is_named(make: Make) -> None:
    producer = make("P", Role.PRODUCER)
    with pytest.raises(ConfigError, match="side_channel_port"):
        make("Q", Role.PRODUCER, producer.config.side_channel_port)


def test_a_consumer_that_closes_frees_the_producer(make: Make) -> None:
    producer, consumer = make("P", Role.PRODUCER), make("D", Role.CONSUMER)
    request = Request("d", list(PROMPT), producer.prefill("p", PROMPT))
    consumer.half.arrived(request)
    until(lambda: consumer.half.lookup(request, 0).tokens, producer)
    consumer.half.plan_step(Step())
    consumer.half.close()
    until(lambda: producer.is_idle, producer)
    assert producer.half.take_stats().counters["closed_leases"] == 1  # type: ignore[union-attr]
