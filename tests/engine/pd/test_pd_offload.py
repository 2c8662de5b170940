"""Offload and P/D together, in vLLM's `MultiConnector`."""

import pytest

from tests.engine import asking
from tests.engine.asking import assert_close
from tests.engine.host import EngineHost, offload
from tests.engine.pd import handing
from tests.engine.pd.hosts import Engines, ours, several
from tests.engine.prompts import tokens

NOISE = 0.02
pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def pair(tiny_engines: Engines) -> list[EngineHost]:
    """A producer that keeps host copies, and a consumer that offloads."""
    return tiny_engines.start_all(
        *(
            {
                "config": several(
                    ours(role, kv_lease_duration=120.0), offload(64 << 20)
                ),
                "block_size": size,
            }
            for role, size in (("producer", 64), ("consumer", 128))
        )
    )


def settled(*hosts: EngineHost) -> None:
    for host in hosts:
        assert not any(host.run(handing.settle).values())


def test_what_the_producer_keeps_in_host_memory_is_handed_over(pair):
    producer, consumer = pair
    prompt = tokens("host copies", 700)
    expected = consumer.run(asking.ask_one, prompt)
    assert consumer.run(asking.reset_within_a_second)
    producer.run(handing.prefill, [prompt])
    producer.run(handing.end_leases)
    settled(producer)
    assert producer.run(asking.reset_within_a_second)
    params = producer.run(handing.prefill, [prompt])
    loaded = producer.run(asking.metrics)["vllm:kvplugin_offload_loaded_tokens"]
    assert loaded >= 640
    (answer,) = consumer.run(handing.decode, [prompt], params)
    assert_close(expected, answer, NOISE)
    assert consumer.run(asking.metrics)["vllm:kvplugin_nixl_reads"] == 1
    settled(producer, consumer)


def test_what_the_consumer_has_read_is_kept_in_its_host_memory(pair):
    producer, consumer = pair
    prompt = tokens("read and kept", 700)
    params = producer.run(handing.prefill, [prompt])
    (read,) = consumer.run(handing.decode, [prompt], params)
    settled(producer, consumer)
    assert consumer.run(asking.reset_within_a_second)
    again = consumer.run(asking.ask_one, prompt)
    assert again.cached_tokens == 5 * 128
    assert_close(read, again, NOISE)
    settled(consumer)


def test_fifty_requests_at_once(pair):
    producer, consumer = pair
    prompts = [tokens(f"offload {i}", 150 + 9 * i) for i in range(50)]
    expected = consumer.run(asking.ask, prompts)
    assert consumer.run(asking.reset_within_a_second)
    params = producer.run(handing.prefill, prompts)
    before = consumer.run(asking.metrics)["vllm:kvplugin_nixl_reads"]
    answers = consumer.run(handing.decode, prompts, params)
    for answer, other in zip(answers, expected, strict=True):
        assert_close(other, answer, NOISE)
    assert consumer.run(asking.metrics)["vllm:kvplugin_nixl_reads"] == before + 50
    settled(producer, consumer)
