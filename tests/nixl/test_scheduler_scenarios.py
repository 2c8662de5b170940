"""Scenarios 25, 43 and 57: leases, delayed ends, restarts, dead peers."""

import pytest

from kvplugin.connectors.nixl.config import Role
from kvplugin.contract import MISS
from tests.nixl.lab import (
    DEAD_TTL,
    LEASE,
    TIMEOUT,
    Engine,
    Request,
    pair,
    spec,
)
from tests.nixl.lab_checks import counters, describes, drain

PROMPT = range(100, 130)


# -- scenarios 25, 43, 57 --------------------------------------------------------------


def test_scenario_25_what_was_read_after_the_lease_is_discarded() -> None:
    network, producer, consumer = pair(spec("P", 4, num_blocks=12))
    params = producer.prefill("a", PROMPT)
    request = consumer.add("b", PROMPT, params)
    consumer.step()
    network.clock.now += LEASE + 1  # nobody renews
    producer.step()
    reuse = producer.add("c", range(500, 530))
    producer.step()
    assert reuse.computed, "the blocks are somebody else's"
    ((worker, read),) = consumer.reads()
    worker.sample(read)
    worker.verify(read)
    consumer.run()
    assert (request.loaded, request.computed) == (0, len(PROMPT))
    assert counters(consumer)["discarded_reads"] == 1
    drain(consumer, producer)


def test_scenario_25_a_lease_that_is_renewed_lives() -> None:
    network, producer, consumer = pair()
    request = consumer.add("b", PROMPT, producer.prefill("a", PROMPT))
    consumer.step()
    for _ in range(11):
        network.clock.now += LEASE / 6
        consumer.channel.renew()
        producer.step()
        assert producer.sending
    drain(consumer, producer)
    assert request.loaded


def test_scenario_25_who_never_comes_frees_the_producer_at_the_lease_s_end() -> None:
    network, producer, _consumer = pair()
    producer.prefill("a", PROMPT)
    network.clock.now += LEASE - 0.01
    producer.step()
    assert producer.sending
    network.clock.now += 0.02
    producer.step()
    producer.check_idle()
    assert counters(producer)["expired_leases"] == 1


def test_a_lease_that_is_over_is_gone_at_once() -> None:
    network, producer, consumer = pair()
    params = producer.prefill("a", PROMPT)
    network.clock.now += LEASE + 1
    request = consumer.add("b", PROMPT, params)
    consumer.step()
    assert request.computed, "no waiting"
    assert counters(consumer)["missed_reads"] == 1
    drain(consumer, producer)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_scenario_43_a_delayed_end_ends(length: int) -> None:
    """A prompt shorter than a block; of one token nothing can be read."""
    _network, producer, consumer = pair()
    params = producer.prefill("a", range(length))
    request = consumer.add("b", range(length), params)
    consumer.run()
    assert request.loaded == length - 1
    for _ in range(2):
        producer.step()
    producer.check_idle()
    drain(consumer, producer)


@pytest.mark.parametrize("name", ["P", "another"])
@pytest.mark.parametrize("idle", [True, False])
def test_scenario_57_a_peer_restarts_at_its_address(name: str, idle: bool) -> None:
    network, producer, consumer = pair()
    other = Engine(network, spec("Q", 4), Role.PRODUCER, 5601)
    consumer.add("b", PROMPT, producer.prefill("a", PROMPT))
    consumer.add("d", PROMPT, other.prefill("c", PROMPT))
    if idle:
        drain(consumer, producer, other)
    else:
        consumer.step()
    first = producer.peer_id
    producer.crash()
    network.clock.now += 2
    producer = Engine(network, spec(name, 4), Role.PRODUCER)
    request = consumer.add("f", PROMPT, producer.prefill("e", PROMPT))
    steady = consumer.add("h", PROMPT, other.prefill("g", PROMPT))
    before = describes(consumer)
    drain(consumer, producer, other)
    assert request.loaded == steady.loaded == len(PROMPT) - 1
    assert describes(consumer) == before or before == 2
    assert describes(consumer) <= 3, "one more handshake, of the one that restarted"
    (worker,) = consumer.workers
    assert worker.peers == {producer.peer_id, other.peer_id}
    assert [p for plan in worker.plans for p in plan.gone_peers] == [first]


def test_scenario_57_an_old_lease_at_a_restarted_peer_is_gone() -> None:
    network, producer, consumer = pair()
    consumer.add("b", PROMPT, producer.prefill("a", PROMPT))
    drain(consumer, producer)
    params = producer.prefill("c", PROMPT)
    producer.crash()
    network.clock.now += 2
    producer = Engine(network, spec("another", 4), Role.PRODUCER)
    for i in range(3):
        request = consumer.add(f"d{i}", PROMPT, params)
        consumer.step()
        assert request.computed, "at once"
        network.clock.now += 2
    drain(consumer, producer)


def test_a_dead_peer_costs_one_wait_and_not_one_a_request() -> None:
    network, producer, consumer = pair()
    params = [producer.prefill(name, PROMPT) for name in "abc"]
    network.silent.add(producer.address)
    first = consumer.add("x", PROMPT, params[0])
    consumer.step()
    assert not first.computed
    network.clock.now += TIMEOUT
    consumer.step()
    assert first.computed
    for i in range(5):
        request = consumer.add(f"y{i}", PROMPT, params[1])
        consumer.step()
        assert request.computed, "at once"
    assert consumer.half.take_stats().gauges["dead_peers"] == 1  # type: ignore[union-attr]
    network.silent.clear()
    network.clock.now += DEAD_TTL - TIMEOUT
    consumer.add("z", PROMPT, params[2])
    network.clock.now += TIMEOUT
    request = consumer.add("zz", PROMPT, producer.prefill("d", PROMPT))
    drain(consumer, producer)
    assert request.loaded, "it is asked again after a while"


def test_a_peer_that_had_little_time_to_open_a_lease_is_not_dead() -> None:
    """Its description had taken most of it."""
    network, producer, consumer = pair()
    params = producer.prefill("a", PROMPT)
    network.holds = True
    late = consumer.add("b", PROMPT, params)
    (asked,) = consumer.channel.asked
    network.clock.now += 0.9 * TIMEOUT
    consumer.channel.deliver(asked)
    consumer.step()
    network.clock.now += 0.1 * TIMEOUT
    consumer.step()
    assert late.computed
    network.holds = False
    request = consumer.add("c", PROMPT, producer.prefill("d", PROMPT))
    consumer.channel.send_closes()
    drain(consumer, producer)
    assert request.loaded


def test_what_a_dead_peer_has_granted_is_not_offered() -> None:
    network, producer, consumer = pair()
    request = Request("b", list(PROMPT), producer.prefill("a", PROMPT))
    consumer.half.arrived(request)
    assert consumer.half.lookup(request, 0).tokens
    network.silent.add(producer.address)
    params = producer.prefill("c", PROMPT)
    other = consumer.add("d", PROMPT, params)
    network.clock.now += TIMEOUT
    consumer.step()
    assert other.computed
    assert consumer.half.lookup(request, 0) == MISS
    consumer.half.finished(request)
    network.silent.clear()
    consumer.channel.send_closes()
    drain(consumer, producer)


def test_a_consumer_that_dies_frees_the_producer() -> None:
    network, producer, consumer = pair()
    consumer.add("b", PROMPT, producer.prefill("a", PROMPT))
    consumer.step()
    consumer.crash()
    network.clock.now += LEASE + 1
    producer.step()
    producer.check_idle()
