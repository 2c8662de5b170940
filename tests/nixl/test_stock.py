"""vLLM's own NixlConnector at the other end of a side channel: its own code, here.

Neither side exchanges anything, both say whom they met, and the listener that was asked
by mistake goes on to serve its own kind.
"""

import logging
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from kvplugin.connectors.nixl import frames, stock, wire
from kvplugin.connectors.nixl.auth import Header
from kvplugin.connectors.nixl.server import ChannelServer
from tests.nixl.channel_lab import (
    PATIENCE_S,
    SECRET,
    Answers,
    Clock,
    ask,
    asking,
    eventually,
    open_lease,
    replies_to,
    serving,
)
from tests.ports import free_port

OURS = "KVPluginNixlConnector"


# -- vLLM's code -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def vllm_nixl() -> Any:
    metadata = pytest.importorskip(
        "vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata"
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import (
        base_scheduler,
        base_worker,
    )

    return SimpleNamespace(
        payload=metadata.NixlHandshakePayload,
        listen=base_scheduler.NixlBaseConnectorScheduler._nixl_handshake_listener,
        handshake=base_worker.NixlBaseConnectorWorker._nixl_handshake,
    )


@pytest.fixture
def stock_listener(vllm_nixl: Any) -> Iterator[SimpleNamespace]:
    """vLLM's listener, with a payload that only its own kind understands."""
    payload = vllm_nixl.payload(
        compatibility_hash="0123abcd", agent_metadata_bytes=b"\x80" * 1000
    )
    encoded = {(0, 0): msgspec.msgpack.Encoder().encode(payload)}
    ready, stop, port = threading.Event(), threading.Event(), free_port()
    thread = threading.Thread(
        target=vllm_nixl.listen,
        args=(encoded, ready, stop, "127.0.0.1", port),
        daemon=True,
    )
    thread.start()
    assert ready.wait(PATIENCE_S)
    yield SimpleNamespace(address=f"127.0.0.1:{port}", port=port, thread=thread)
    stop.set()
    thread.join(PATIENCE_S)


def _handshake(
    vllm_nixl: Any, port: int, compat_hash: str, enforce: bool = True
) -> Any:
    """vLLM's handshake, as a worker of a consumer does it."""
    worker = SimpleNamespace(
        _is_csa_linear=False,
        use_host_buffer=True,
        transfer_topo=SimpleNamespace(handshake_target_ranks=lambda tp, dcp: [0]),
        compat_hash=compat_hash,
        enforce_compat_hash=enforce,
    )
    return vllm_nixl.handshake(worker, "127.0.0.1", port, 1, "engine")


@pytest.mark.engine
def test_our_client_is_refused_by_vllms_listener_which_lives_on(
    vllm_nixl: Any, stock_listener: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    vllm_logger = logging.getLogger("vllm")
    vllm_logger.addHandler(caplog.handler)  # it does not propagate
    try:
        with asking() as client:
            for question in (wire.Describe(), open_lease()):
                reply = ask(client, stock_listener.address, question, 50.0)
                assert reply.answer is None
                assert reply.final
                assert "vLLM's own NixlConnector (as of vLLM 0.32)" in reply.error
                assert OURS in reply.error
            client.drop(stock_listener.address, "l", "r")
    finally:
        vllm_logger.removeHandler(caplog.handler)
    assert f"unexpected message b'{OURS}/1 " in caplog.text  # its log names us
    with pytest.raises(RuntimeError, match="Remote: 0123abcd"):  # and it serves others
        _handshake(vllm_nixl, stock_listener.port, "another")
    assert stock_listener.thread.is_alive()


@pytest.mark.engine
def test_vllms_client_is_refused_by_our_server_by_name(
    vllm_nixl: Any, caplog: pytest.LogCaptureFixture
) -> None:
    server = ChannelServer("127.0.0.1", 0, Answers(), secret=SECRET)
    port = int(server.address.rpartition(":")[2])
    try:
        with caplog.at_level(logging.WARNING, "vllm.kvplugin.nixl"):
            with pytest.raises(RuntimeError, match=rf"hash mismatch.*Remote: .*{OURS}"):
                _handshake(vllm_nixl, port, "0123abcd")
            with pytest.raises(RuntimeError, match="Failed to decode"):
                _handshake(vllm_nixl, port, "0123abcd", enforce=False)
        assert "vLLM's own NixlConnector (as of vLLM 0.32) at 127.0.0.1" in caplog.text
        assert OURS in caplog.text
        with asking() as client:
            assert ask(client, server.address).answer is not None
    finally:
        server.close()


@pytest.mark.engine
def test_a_peer_that_becomes_vllms_own_is_recognised_and_not_harmed(
    vllm_nixl: Any,
) -> None:
    """Ours has gone, vLLM's listens on the same port, and a lease is still renewed:
    the renewals of a connection made anew do not end the listener."""
    port = free_port()
    with asking() as client:
        with serving(port=port) as server:
            assert ask(client, server.address).answer is not None
            client.keep(server.address, "lease", "reader", 0.05)
        payload = vllm_nixl.payload("0123abcd", b"")
        encoded = {(0, 0): msgspec.msgpack.Encoder().encode(payload)}
        ready, stop = threading.Event(), threading.Event()
        thread = threading.Thread(
            target=vllm_nixl.listen,
            args=(encoded, ready, stop, "127.0.0.1", port),
            daemon=True,
        )
        thread.start()
        assert ready.wait(PATIENCE_S)
        eventually(lambda: ask(client, f"127.0.0.1:{port}", timeout=50.0).final)
        with pytest.raises(RuntimeError, match="Remote: 0123abcd"):
            _handshake(vllm_nixl, port, "another")
        assert thread.is_alive()
        stop.set()  # it ends when nobody has asked it for a second
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


# -- the same on the wire, with libzmq's sockets ---------------------------------------


@pytest.fixture
def context() -> Iterator[Any]:
    made = zmq.Context()
    yield made
    made.destroy(linger=0)


def test_a_client_of_vllm_0_32_gets_two_frames_it_can_decode(context: Any) -> None:
    with serving() as server:
        requester = context.socket(zmq.REQ)
        requester.setsockopt(zmq.RCVTIMEO, int(1000 * PATIENCE_S))
        requester.connect(f"tcp://{server.address}")
        for rank in (0, 7):
            requester.send(msgspec.msgpack.encode((b"get_meta_msg", 0, rank)))
            payload, clock = requester.recv_multipart()
            assert OURS in msgspec.msgpack.decode(payload)["compatibility_hash"]
            assert isinstance(msgspec.msgpack.decode(clock), float)


def test_a_client_of_vllm_0_19_gets_one_frame_and_may_ask_again(
    context: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It reads one frame only: a second one would break its socket."""
    server = ChannelServer("127.0.0.1", 0, Answers(), secret=b"")
    try:
        requester = context.socket(zmq.REQ)
        requester.setsockopt(zmq.RCVTIMEO, int(1000 * PATIENCE_S))
        requester.connect(f"tcp://{server.address}")
        for rank in (0, 1):
            requester.send(msgspec.msgpack.encode((b"get_meta_msg", rank)))
            payload = msgspec.msgpack.decode(requester.recv())
            assert OURS in payload["compatibility_hash"]
        assert "vLLM's own NixlConnector (as of vLLM 0.19)" in caplog.text
    finally:
        server.close()


@pytest.mark.parametrize("ends", [True, False])
def test_a_listener_of_another_vllm_is_named_though_it_cannot_answer(
    context: Any, ends: bool
) -> None:
    """That of 0.19 ends at three things, one of 0.32 at two; others say nothing."""
    clock = Clock()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.RCVTIMEO, int(1000 * PATIENCE_S))
    port = router.bind_to_random_port("tcp://127.0.0.1")
    with asking(clock=clock) as client:
        ticket = client.ask(f"127.0.0.1:{port}", wire.Describe(), 100.0)
        router.recv_multipart()
        if ends:
            router.close(0)
        else:
            clock.now += 1.0
        reply = replies_to(client, [ticket])[ticket]
        assert reply.final
        assert "vLLM's own NixlConnector as of another vLLM" in reply.error
        assert OURS in reply.error
        if not ends:
            router.setsockopt(zmq.RCVTIMEO, 0)
            with pytest.raises(zmq.Again):  # one hello is enough
                router.recv_multipart()


def test_beside_vllm_0_19_its_listener_survives_and_is_recognised(
    context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As its `_nixl_handshake_listener` reads and answers, in v1/nixl_connector.py."""
    monkeypatch.setattr(stock, "FIELDS", 2)
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.RCVTIMEO, int(1000 * PATIENCE_S))
    port = router.bind_to_random_port("tcp://127.0.0.1")
    payload = {"compatibility_hash": "0123abcd", "agent_metadata_bytes": b"\x80"}
    with asking() as client, serving() as server:
        ticket = client.ask(f"127.0.0.1:{port}", wire.Describe(), 1e6)
        identity, _, message = router.recv_multipart()
        text, rank = msgspec.msgpack.decode(message)
        assert text.startswith(OURS.encode())
        assert rank == 0
        router.send_multipart((identity, b"", msgspec.msgpack.encode(payload)))
        reply = replies_to(client, [ticket])[ticket]
        assert reply.final
        assert "vLLM's own NixlConnector (as of vLLM 0.19)" in reply.error
        assert ask(client, server.address).answer is not None  # and ours understand


def test_the_answer_of_vllm_0_19_is_recognised_too() -> None:
    payload = msgspec.msgpack.encode(
        {"compatibility_hash": "0123abcd", "agent_metadata_bytes": b"\x80"}
    )
    assert frames.from_server([b"", payload]) == frames.StockAnswer("0.19")
    clock = msgspec.msgpack.encode(1.5)
    assert frames.from_server([b"", payload, clock]) == frames.StockAnswer("0.32")


@pytest.mark.parametrize(
    "fields",
    [
        [],
        [b"get_meta_msg"],
        [b"get_meta_msg", 0, 0, 0],
        [b"get_meta_msg", "0"],
        [b"get_meta_msg", True],
        ["get_meta_msg", 0, 0],
        [b"other", 0, 0],
        {b"get_meta_msg": 0},
        None,
        b"get_meta_msg",
    ],
)
def test_what_no_vllm_asks(fields: Any) -> None:
    assert stock.asks(fields) == ""


@pytest.mark.parametrize("fields", [2, 3])
def test_every_message_of_ours_is_one_that_vllms_listener_survives(
    fields: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes exactly so many things, and has metadata for rank 0 only."""
    monkeypatch.setattr(stock, "FIELDS", fields)
    question = frames.asked(Header(b"n" * 16, b"c" * 16, 9), bytes(32), b"body")
    for message in (frames.hello(), question):
        text, *ranks = msgspec.msgpack.decode(message)
        assert text.startswith(OURS.encode())
        assert ranks == [0] * (fields - 1)


def test_a_dealer_of_libzmq_can_ask_our_server(context: Any) -> None:
    """The side channel is ZMQ's: any of its sockets is a peer, heartbeats included."""
    with serving() as server:
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.HEARTBEAT_IVL, 10)
        dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(1000 * PATIENCE_S))
        dealer.setsockopt(zmq.RCVTIMEO, int(1000 * PATIENCE_S))
        dealer.connect(f"tcp://{server.address}")
        for _ in range(50):
            dealer.send_multipart([b"", frames.hello()])
            said = frames.from_server(dealer.recv_multipart())
            assert isinstance(said, frames.Welcome)


def test_our_client_can_ask_a_router_of_libzmq(context: Any) -> None:
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.RCVTIMEO, int(1000 * PATIENCE_S))
    port = router.bind_to_random_port("tcp://127.0.0.1")
    with asking() as client:
        client.ask(f"127.0.0.1:{port}", wire.Describe(), 1e6)
        identity, empty, message = router.recv_multipart()
        assert empty == b""
        assert frames.from_client([empty, message]) == frames.Hello(1)
        large = frames.answered(1, bytes(32), bytes(1 << 20))
        router.send_multipart([identity, b"", large])  # to nothing that was asked
        router.send_multipart([identity, b"", frames.welcome(b"n" * 16, signed=True)])
        _, _, message = router.recv_multipart()
        assert isinstance(frames.from_client([b"", message]), frames.Asked)
