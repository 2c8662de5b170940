"""Parameters, peers and answers that make no sense: the request is computed."""

import logging
from typing import Any

import msgspec
import pytest

from kvplugin.connectors.nixl.channel import Reply
from kvplugin.connectors.nixl.wire import (
    Answer,
    Closed,
    Describe,
    Description,
    Gone,
    Granted,
    Open,
    Question,
    Refused,
    Renewed,
)
from kvplugin.contract import LATER, MISS, Step
from tests.nixl.lab import (
    LEASE,
    TIMEOUT,
    Request,
    pair,
)
from tests.nixl.lab_checks import counters, drain

PROMPT = range(100, 130)


# -- parameters and peers that make no sense -------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        {"do_remote_prefill": True},
        {"do_remote_prefill": True, "remote_block_ids": [[1]], "remote_port": 1},
        {"do_remote_prefill": True, "remote_block_ids": "x"},
        {"do_remote_prefill": 7},
        {"do_remote_prefill": True, "do_remote_decode": True},
    ],
    ids=str,
)
def test_a_request_with_wrong_parameters_computes(
    params: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    _network, producer, consumer = pair()
    with caplog.at_level(logging.WARNING, "vllm.kvplugin.nixl"):
        request = consumer.add("b", PROMPT, params)
        consumer.run()
    assert request.computed == len(PROMPT)
    assert counters(consumer)["invalid_params"] == 1
    assert sum("no sense" in message for message in caplog.messages) == 1
    assert not consumer.channel.history
    drain(consumer, producer)


def test_many_wrong_parameters_are_one_line_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    network, producer, consumer = pair()
    wrong = {"do_remote_prefill": 7}

    def comes_and_goes(name: str) -> None:
        request = Request(name, [1, 2], wrong)
        consumer.half.arrived(request)
        consumer.half.finished(request)

    with caplog.at_level(logging.WARNING, "vllm.kvplugin.nixl"):
        for i in range(20):
            comes_and_goes(f"b{i}")
        assert len(caplog.messages) == 1
        assert "do_remote_prefill" in caplog.messages[0]
        network.clock.now += 61
        comes_and_goes("c")
        assert "(20 since the last such line)" in caplog.messages[1]
    assert counters(consumer)["invalid_params"] == 21
    drain(consumer, producer)


def test_a_limit_of_ours_costs_the_request_and_not_the_peer() -> None:
    network, producer, consumer = pair()
    params = [producer.prefill(name, PROMPT) for name in "ab"]
    network.script = lambda _, question: (
        Reply(0, None, "too many questions", local=True)
        if isinstance(question, Open)
        else None
    )
    request = consumer.add("c", PROMPT, params[0])
    consumer.run()
    assert (request.loaded, request.computed) == (0, len(PROMPT))
    network.script = None
    other = [*PROMPT, 1, 2, 3]
    assert consumer.half._peers is not None
    assert set(consumer.half._peers.states.values()) == {"ready"}
    request = Request("d", other, params[1])
    consumer.half.arrived(request)
    assert consumer.half.lookup(request, 0).tokens, "the peer is asked as ever"
    consumer.half.finished(request)
    network.clock.now += LEASE + 1
    drain(consumer, producer)


@pytest.mark.parametrize(
    "changes",
    [
        {"block_ids": [[1]], "generations": [[0]]},
        {"block_ids": [[1], [2]], "generations": [[0], [0]]},
        {"block_ids": [[10**6] * 8], "generations": [[0] * 8]},
        {"block_ids": [[-1] * 8], "generations": [[0] * 8]},
        {"block_ids": [[1] * 10_000], "generations": [[0] * 10_000]},
        {"block_ids": [[]], "generations": [[]]},
        {"num_tokens": -1},
        {"num_tokens": 2**60},
        {"token_digests": []},
        {"token_digests": [b"x" * 32]},
        {"token_digests": [b"x"] * 10_000},
        {"seconds": -1.0},
        {"seconds": float("inf")},
    ],
    ids=lambda changes: str(changes)[:60],
)
def test_a_hostile_grant_is_not_believed(changes: dict[str, Any]) -> None:
    network, producer, consumer = pair()
    params = producer.prefill("a", PROMPT)
    server = network.servers[producer.address]

    def script(address: str, question: Question) -> Answer | None:
        if isinstance(question, Open):
            granted = server.open(question)
            assert isinstance(granted, Granted)
            return msgspec.structs.replace(granted, **changes)
        return None

    network.script = script
    request = consumer.add("b", PROMPT, params)
    drain(consumer, producer)
    assert request.loaded == 0
    assert request.computed == len(PROMPT)
    assert not consumer.workers[0].seen


@pytest.mark.parametrize(
    "answer",
    [
        Renewed(gone=[]),
        Closed(),
        Refused(reason="not now"),
        Reply(0, None, "no connection"),
        Reply(0, None, "another secret", final=True),
        Description(descriptor=b"\x00"),
        Description(descriptor=b""),
        Gone(reason="who?"),
    ],
    ids=lambda answer: type(answer).__name__,
)
@pytest.mark.parametrize("kind", [Describe, Open])
def test_whatever_a_peer_answers_the_request_is_computed(
    kind: type, answer: Answer | Reply
) -> None:
    network, producer, consumer = pair()
    params = producer.prefill("a", PROMPT)
    network.script = lambda _, question: answer if isinstance(question, kind) else None
    request = consumer.add("b", PROMPT, params)
    consumer.run()
    assert (request.loaded, request.computed) == (0, len(PROMPT))
    network.script = None
    network.clock.now += LEASE + 1
    drain(consumer, producer)


def test_no_lookup_waits_longer_than_the_handshake_may_take() -> None:
    network, producer, consumer = pair()
    params = producer.prefill("a", PROMPT)
    network.holds = True
    request = Request("b", list(PROMPT), params)
    consumer.half.arrived(request)
    network.clock.now += TIMEOUT - 0.1
    assert consumer.half.lookup(request, 0) == LATER
    network.clock.now += 0.1
    assert consumer.half.lookup(request, 0) == MISS
    consumer.half.finished(request)
    network.holds = False
    network.clock.now += LEASE
    consumer.channel.send_closes()
    drain(consumer, producer)


def test_nor_if_the_channel_never_says_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network, producer, consumer = pair()
    params = producer.prefill("a", PROMPT)
    monkeypatch.setattr(consumer.channel, "take", lambda wait: [])
    network.holds = True
    for name in ("b", "c", "d"):
        request = Request(name, list(PROMPT), params)
        consumer.half.arrived(request)
        network.clock.now += TIMEOUT
        assert consumer.half.lookup(request, 0) == MISS
        consumer.half.finished(request)
    request = Request("e", list(PROMPT), params)
    consumer.half.arrived(request)
    assert consumer.half.lookup(request, 0) == MISS, "the peer counts as dead by now"


def test_a_late_grant_is_given_back() -> None:
    network, producer, consumer = pair()
    params = producer.prefill("a", PROMPT)
    consumer.add("x", PROMPT, producer.prefill("y", PROMPT))
    consumer.run()
    network.holds = True
    request = Request("b", list(PROMPT), params)
    consumer.half.arrived(request)
    (asked,) = consumer.channel.asked
    consumer.channel.deliver(asked)
    consumer.half.finished(request)
    assert consumer.half.plan_step(Step()) == b""
    assert not consumer.channel.kept
    network.holds = False
    consumer.channel.send_closes()
    drain(consumer, producer)
    assert counters(producer)["closed_leases"] == 2
