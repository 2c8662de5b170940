"""vLLM's own NixlConnector at the other end: refused by name, and the text is right."""

import re
from contextlib import nullcontext

import pytest

from tests.engine import asking
from tests.engine.asking import assert_close
from tests.engine.host import EngineHost, EngineStartError
from tests.engine.pd import handing
from tests.engine.pd.hosts import Engines, ours, stock
from tests.engine.prompts import tokens
from tests.engine.version import is_019
from tests.ports import free_port

NOISE = 0.02
_AS_USUAL = nullcontext()
OURS = r"KVPluginNixlConnector \(kvplugin "
THEIRS = r"vLLM's own NixlConnector \(as of vLLM "


def vllms(tiny_engines: Engines, role: str) -> dict:
    return {
        "config": stock(role, kv_lease_duration=10),
        "environment": {
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
            "VLLM_NIXL_ABORT_REQUEST_TIMEOUT": "10",  # the lease's duration in 0.19
        },
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
def two(tiny_engines: Engines) -> list[EngineHost]:
    """Ours and vLLM's; each hands over and reads."""
    return tiny_engines.start_all(
        {"config": ours("both", kv_lease_duration=10.0)}, vllms(tiny_engines, "both")
    )


@pytest.fixture(scope="module")
def four(two: list[EngineHost], tiny_engines: Engines) -> list[EngineHost]:
    """The same, and a consumer of each."""
    return two + tiny_engines.start_all(
        {"config": ours("consumer")}, vllms(tiny_engines, "consumer")
    )


def test_our_consumer_refuses_vllms_producer(two):
    consumer, producer = two
    meet(producer, consumer, "ours reads")
    log = consumer.log.read_text()
    assert len(re.findall(f"{THEIRS}.* answers at .*{OURS}", log)) == 1
    for host in two:
        assert not host.run(handing.settle)["blocks"]


def test_vllms_consumer_is_refused_by_our_producer(two):
    producer, consumer = two
    # That of 0.19 ends with the first handshake that fails, whoever it was with.
    with pytest.raises(EngineStartError, match="KeyError") if is_019() else _AS_USUAL:
        meet(producer, consumer, "vLLM reads")
    assert re.search(f"{THEIRS}.* asked for this .*{OURS}", producer.log.read_text())
    assert re.search(OURS, consumer.log.read_text())
    assert not any(producer.run(handing.settle).values())


@pytest.mark.full
@pytest.mark.skipif(is_019(), reason="vLLM 0.19's consumer has ended")
def test_the_others_go_on(four):
    producer, their_producer, consumer, their_consumer = four
    meet(producer, consumer, "ours after that")
    assert consumer.run(asking.metrics)["vllm:kvplugin_nixl_reads"] == 2
    meet(their_producer, their_consumer, "theirs after that")
