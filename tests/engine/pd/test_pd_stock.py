"""vLLM's own NixlConnector at the other end: refused by name, and the text is right."""

import pytest

from tests.engine import asking
from tests.engine.asking import assert_close
from tests.engine.host import EngineHost
from tests.engine.pd import handing
from tests.engine.pd.hosts import Engines, free_port, ours, stock
from tests.engine.prompts import tokens

NOISE = 0.02
BOTH_NAMES = ("KVPluginNixlConnector", "NixlConnector")


def vllms(tiny_engines: Engines, role: str) -> dict:
    return {
        "config": stock(role),
        "environment": {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())},
    }


def meet(producer: EngineHost, consumer: EngineHost, seed: str) -> None:
    """A prompt goes from one to the other, twice; the second refusal takes no time."""
    for number in range(2):
        prompt = tokens(f"stock {seed} {number}", 300)
        expected = consumer.run(asking.ask_one, prompt)
        assert consumer.run(asking.reset_within_a_second)
        params = producer.run(handing.prefill, [prompt])
        (answer,) = consumer.run(handing.decode, [prompt], params)
        assert answer.finish_reason == "length"
        assert_close(expected, answer, NOISE)


@pytest.fixture(scope="module")
def four(tiny_engines: Engines) -> list[EngineHost]:
    """Ours and vLLM's, producer and consumer each."""
    return tiny_engines.start_all(
        {"config": ours("producer", kv_lease_duration=10.0)},
        {"config": ours("consumer")},
        vllms(tiny_engines, "producer"),
        vllms(tiny_engines, "consumer"),
    )


@pytest.mark.full
def test_our_consumer_refuses_vllms_producer(four):
    _, consumer, producer, _ = four
    meet(producer, consumer, "ours reads")
    log = consumer.log.read_text()
    assert all(name in log for name in BOTH_NAMES)
    assert log.count("speaks another protocol") <= 1
    assert not consumer.run(handing.settle)["blocks"]


@pytest.mark.full
def test_vllms_consumer_is_refused_by_our_producer(four):
    producer, _, _, consumer = four
    meet(producer, consumer, "vLLM reads")
    assert all(name in producer.log.read_text() for name in BOTH_NAMES)
    assert "KVPluginNixlConnector" in consumer.log.read_text()
    assert not any(producer.run(handing.settle).values())


@pytest.mark.full
def test_the_others_go_on(four):
    producer, consumer, their_producer, their_consumer = four
    meet(producer, consumer, "ours after that")
    assert consumer.run(asking.metrics)["vllm:kvplugin_nixl_reads"] == 2
    meet(their_producer, their_consumer, "theirs after that")
