"""Both halves of control as they should be: who reads what, who gives what."""

import logging
from dataclasses import replace

import pytest

from kvplugin.connectors.nixl.channel import Server
from kvplugin.connectors.nixl.config import NixlConfig, Role
from kvplugin.connectors.nixl.scheduler import NixlScheduler
from kvplugin.connectors.nixl.wire import Gone, Health, Open
from kvplugin.contract import MeetsPeers
from kvplugin.errors import ConfigError, KVPluginError
from tests.nixl.lab import (
    LEASE,
    Clock,
    Engine,
    Network,
    introduction,
    pair,
    spec,
)
from tests.nixl.lab_checks import counters, describes, drain, opens

PROMPT = range(100, 130)


# -- as it should be -------------------------------------------------------------------


def test_a_prompt_is_read_once_and_both_sides_are_free() -> None:
    _network, producer, consumer = pair()
    assert isinstance(producer.half, MeetsPeers)
    params = producer.prefill("a", PROMPT)
    assert producer.half.has_pending_work()
    request = consumer.add("b", PROMPT, params)
    assert consumer.channel.kept, "opened and kept from its arrival on"
    consumer.step()
    assert consumer.half.has_pending_work()
    (worker,) = consumer.workers
    assert [peer.peer_id for peer in worker.plans[0].new_peers] == [producer.peer_id]
    drain(consumer, producer)
    assert request.loaded == len(PROMPT) - 1
    assert counters(consumer)["reads"] == 1
    assert counters(producer)["closed_leases"] == 1


def test_a_second_request_of_a_known_peer_asks_for_its_lease_alone() -> None:
    _network, producer, consumer = pair()
    for name in "abc":
        consumer.add(f"d{name}", PROMPT, producer.prefill(name, PROMPT))
        drain(consumer, producer)
    assert describes(consumer) == 1
    assert len(opens(consumer)) == 3


def test_an_engine_that_never_says_that_a_request_has_arrived() -> None:
    """As vLLM 0.19: the first lookup is the arrival."""
    _network, producer, consumer = pair()
    params = producer.prefill("a", PROMPT)
    request = consumer.add("b", PROMPT, params, says_arrived=False)
    assert not consumer.channel.history
    drain(consumer, producer)
    assert request.loaded == len(PROMPT) - 1


def test_samples_of_one_request_share_a_lease() -> None:
    _network, producer, consumer = pair()
    params = producer.prefill("a", PROMPT)
    requests = [consumer.add(f"b{i}", PROMPT, params) for i in range(2)]
    assert len({question.reader for question in opens(consumer)}) == 2
    consumer.run(1)
    producer.step()
    assert producer.half.has_pending_work() or not consumer.reads()
    drain(consumer, producer)
    assert [request.loaded for request in requests] == [len(PROMPT) - 1] * 2


@pytest.mark.parametrize(
    ("theirs", "ours"), [((4,), (16,)), ((16,), (4,)), ((4, 8), (16, 16))]
)
def test_block_sizes_differ(theirs: tuple[int, ...], ours: tuple[int, ...]) -> None:
    _network, producer, consumer = pair(
        spec("P", *theirs, window=20), spec("D", *ours, window=20)
    )
    params = producer.prefill("a", PROMPT)
    request = consumer.add("b", PROMPT, params)
    drain(consumer, producer)
    assert request.loaded == len(PROMPT) - 1
    if theirs == (4, 8):
        # The window's first block, of 16 tokens, begins where the producer has nothing.
        assert len(set(consumer.blocks.forgotten)) == 1


def test_a_prompt_that_goes_on_differently_reads_what_is_the_same() -> None:
    _network, producer, consumer = pair(spec("P", 4), spec("D", 4))
    params = producer.prefill("a", range(100, 230))
    request = consumer.add("b", [*range(100, 200), *range(7, 20)], params)
    other = consumer.add("c", [7, *range(101, 230)], params)
    drain(consumer, producer)
    assert request.loaded == 64, "digests stand for 64 tokens"
    assert other.loaded == 0
    assert counters(consumer)["missed_reads"] == 1


def test_fewer_tokens_than_pay_are_computed() -> None:
    _network, producer, consumer = pair(min_load_tokens=30)
    request = consumer.add("b", PROMPT, producer.prefill("a", PROMPT))
    drain(consumer, producer)
    assert request.loaded == 0
    assert not consumer.workers[0].seen


# -- who does what ---------------------------------------------------------------------


def test_a_producer_reads_nothing_and_a_consumer_gives_nothing() -> None:
    network, producer, consumer = pair()
    params = producer.prefill("a", PROMPT)
    request = producer.add("b", PROMPT, params)
    assert not producer.channel.history
    producer.run()
    assert request.loaded == 0
    asked = consumer.add("c", PROMPT, {"do_remote_decode": True})
    consumer.run()
    assert not asked.params
    answers = network.servers[consumer.address]
    found = answers.open(Open(peer_id=consumer.peer_id, lease="c", reader="r"))
    assert isinstance(found, Gone)
    network.clock.now += LEASE + 1
    drain(consumer, producer)


def test_the_next_turn_is_read_back_from_the_decoder() -> None:
    network, producer, consumer = pair(
        bidirectional_kv_xfer=True, kv_recompute_threshold=8
    )
    params = producer.prefill("a", PROMPT)
    first = consumer.add("b", PROMPT, params)
    consumer.run(4)
    assert first.params is not None
    assert first.params["do_remote_decode"] is True
    turn = [*PROMPT, *range(500, 520)]
    second = producer.add("c", turn, first.params)
    producer.run(4)
    assert second.loaded == len(PROMPT)
    short = producer.add("d", range(100, 107), {**first.params})
    producer.run(4)
    assert short.loaded == 0, "below kv_recompute_threshold"
    network.clock.now += 500
    drain(producer, consumer)


def test_without_bidirectional_nothing_is_read_back() -> None:
    network, producer, consumer = pair()
    params = {**producer.prefill("a", PROMPT)}
    params.update(do_remote_prefill=False, do_remote_decode=True)
    request = producer.add("b", PROMPT, params)
    producer.run()
    assert request.loaded == 0
    network.clock.now += LEASE + 1
    drain(consumer, producer)


def test_without_introductions_nothing_is_read_or_handed_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    network = Network(Clock())
    engine = Engine(network, spec("P", 4), Role.BOTH, meets=False)
    engine.half.meet({})
    other = Engine(network, spec("Q", 4), Role.PRODUCER, 5700)
    with caplog.at_level(logging.WARNING, "vllm.kvplugin.nixl"):
        for i in range(3):
            request = engine.add(f"r{i}", PROMPT, {"do_remote_decode": True})
            engine.step()
            assert request.params is None
            request = engine.add(f"s{i}", PROMPT, other.prefill(f"t{i}", PROMPT))
            engine.step()
            assert request.loaded == 0
    assert sum("introduced" in message for message in caplog.messages) == 2
    engine.check_idle()
    engine.half.close()


def test_without_the_engines_block_pool_nothing_is_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As inside vLLM 0.19's `MultiConnector`."""
    _network, producer, consumer = pair()
    consumer.half.bind_blocks(None)  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING, "vllm.kvplugin.nixl"):
        for i in range(3):
            params = producer.prefill(f"p{i}", PROMPT)
            request = consumer.add(f"d{i}", PROMPT, params)
            drain(consumer, producer)
            assert request.loaded == 0
    assert sum("block pool" in message for message in caplog.messages) == 1


def test_an_engine_that_cannot_hear_of_failures_may_not_read() -> None:
    info = replace(spec("D", 4).info(), reports_failed_loads=False)
    with pytest.raises(ConfigError, match="scheduler_cls"):
        NixlScheduler(info, NixlConfig(), Role.CONSUMER)
    NixlScheduler(info, NixlConfig(), Role.PRODUCER).close()


def test_a_start_that_fails_is_an_error_or_a_log_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    network = Network(Clock())
    bad = {0: introduction(spec("P", 4), 7), 1: introduction(spec("P", 4), 7)}
    engine = Engine(network, spec("P", 4), meets=False)
    with pytest.raises(KVPluginError):
        engine.half.meet(bad)
    engine = Engine(network, spec("P", 4), meets=False, on_start_error="disable")
    with caplog.at_level(logging.ERROR, "vllm.kvplugin.nixl"):
        engine.half.meet(bad)
    assert "P/D is disabled" in caplog.text
    engine.add("a", PROMPT, {"do_remote_decode": True})
    engine.run()
    engine.check_idle()


def test_health_says_what_is_there() -> None:
    network, producer, consumer = pair()
    params = producer.prefill("a", PROMPT)
    health = network.servers[producer.address].status()
    assert health == Health(
        engine_id="P", role="producer", leases=1, overdue_blocks=0, peers={}
    )
    consumer.add("b", PROMPT, params)
    health = network.servers[consumer.address].status()
    assert health.role == "consumer"
    assert health.peers == {producer.address: "ready"}


def test_a_consumer_says_which_engine_it_refuses() -> None:
    """Whoever asks how it is need not look into its log."""
    network, producer, _ = pair()
    other = Engine(network, spec("D", 4), Role.CONSUMER, 5800, weight_epoch=7)
    other.add("b", PROMPT, producer.prefill("a", PROMPT))
    (state,) = network.servers[other.address].status().peers.values()
    assert state.startswith("refused: ")
    assert "weight_epoch" in state
    assert "7" in state


@pytest.mark.parametrize("role", list(Role))
def test_a_taken_port_ends_the_start_of_those_that_are_read_from(
    role: Role, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def serve(engine: Engine, config: NixlConfig, answers: object) -> Server:
        raise ConfigError(f"port {config.side_channel_port} is taken")

    monkeypatch.setattr(Engine, "_serve", serve)
    network = Network(Clock())
    if role is not Role.CONSUMER:
        with pytest.raises(ConfigError, match="port 5600 is taken"):
            Engine(network, spec("E", 4), role)
        return
    Engine(network, spec("E", 4), Role.CONSUMER).half.close()
    assert "nobody can ask this engine how it is: port 5600 is taken" in caplog.text


def test_peers_that_are_met_at_once_are_looked_into_one_a_step() -> None:
    """The last one is met without a further answer from anybody."""
    network, first, consumer = pair()
    others = [
        Engine(network, spec(f"P{i}", 4), Role.PRODUCER, 5600 + i) for i in (1, 2, 3)
    ]
    producers = [first, *others]
    requests = [
        consumer.add(f"d{i}", PROMPT, producer.prefill(f"p{i}", PROMPT))
        for i, producer in enumerate(producers)
    ]
    assert consumer.half._peers is not None
    for met in (1, 1, 2, 3, 4):  # the first when its request came
        assert len(consumer.half._peers.states) == met
        consumer.step()
    drain(consumer, *producers)
    assert [request.loaded for request in requests] == [len(PROMPT) - 1] * 4
    assert describes(consumer) == 4
