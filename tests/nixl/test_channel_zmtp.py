"""The protocol under the side channel, byte by byte; what the log says of strangers."""

import logging
import struct

import pytest

from kvplugin.connectors.nixl.grumble import EVERY_S, Grumble
from kvplugin.connectors.nixl.zmtp import Zmtp
from kvplugin.errors import IntegrityError
from tests.nixl.channel_lab import Clock

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"


def _fed(data: bytes, max_bytes: int = 1000) -> Zmtp:
    zmtp = Zmtp("ROUTER", max_bytes)
    zmtp.feed(data)
    return zmtp


def _feed_slowly(zmtp: Zmtp, data: bytes) -> None:
    for byte in data:
        zmtp.feed(bytes((byte,)))
        assert zmtp.next_message() is None


def test_ready_says_who_is_there_before_anything_is_asked() -> None:
    ours, others = Zmtp("DEALER", 100), _fed(GREETING + READY)
    server = Zmtp("ROUTER", 100)
    for _ in range(2):
        server.feed(bytes(ours.output))
        ours.output.clear()
        assert server.next_message() is None
        ours.feed(bytes(server.output))
        server.output.clear()
        assert ours.next_message() is None
    assert others.next_message() is None
    assert server.is_ready
    assert others.is_ready
    assert server.is_ours
    assert ours.is_ours
    assert not others.is_ours


@pytest.mark.parametrize("version", [3, 4, 255])
def test_later_versions_speak_ours(version: int) -> None:
    greeting = bytearray(GREETING)
    greeting[10] = version
    zmtp = _fed(bytes(greeting) + READY + b"\x01\x00\x00\x01x")
    assert zmtp.next_message() == [b"", b"x"]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "not ZMTP: b'GET / HTTP/1.1"),
        (b"\xff" + bytes(8) + b"\x7e", "not ZMTP"),
        (GREETING[:10] + b"\x01" + GREETING[11:], "ZMTP 1"),
        (GREETING.replace(b"NULL\0", b"PLAIN"), "PLAIN"),
        (GREETING + b"\x00\x01x", "before READY"),
        (GREETING + b"\x08\x00", "flags 0x08"),
        (GREETING + b"\x04\x0a\x05ERROR\x03bad", r"the peer says b'bad'"),
        (GREETING + b"\x06" + struct.pack(">Q", 513), "513 bytes is too large"),
        (GREETING + READY + b"\x02" + struct.pack(">Q", 1001), "1001 bytes is too"),
        (GREETING + READY + b"\x02" + b"\xff" * 8, "too large"),
        (
            GREETING + READY + b"\x03" + struct.pack(">Q", 600) + bytes(600) + b"\x02"
            b"" + struct.pack(">Q", 401),
            "401 bytes is too large",
        ),
        (GREETING + READY + b"\x01\x00" * 4, "more than 4 frames"),
    ],
)
def test_what_is_not_our_protocol_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(IntegrityError, match=why):
        _fed(data).next_message()
    zmtp = Zmtp("ROUTER", 1000)
    with pytest.raises(IntegrityError, match=why.partition(":")[0]):
        _feed_slowly(zmtp, data)


def test_messages_count_anew() -> None:
    zmtp = _fed(GREETING + READY)
    for _ in range(10):
        zmtp.feed(b"\x03" + struct.pack(">Q", 500) + bytes(500))
        zmtp.feed(b"\x02" + struct.pack(">Q", 500) + bytes(500))
        assert zmtp.next_message() == [bytes(500), bytes(500)]


def test_a_ping_gets_its_pong_also_between_frames() -> None:
    zmtp = _fed(GREETING + READY + b"\x01\x00" + b"\x04\x0a\x04PING\x00\x09abc")
    assert zmtp.next_message() is None
    assert bytes(zmtp.output).endswith(b"\x04\x08\x04PONGabc")
    zmtp.feed(b"\x00\x01x")
    assert zmtp.next_message() == [b"", b"x"]


@pytest.mark.parametrize(
    "command", [b"\x04\x00", b"\x04\x01\xff", b"\x04\x06\x04NEWSx"]
)
def test_commands_that_nobody_knows_are_passed_over(command: bytes) -> None:
    zmtp = _fed(GREETING + READY + command + b"\x00\x01x")
    assert zmtp.next_message() == [b"x"]


# -- what the log says -----------------------------------------------------------------


def test_one_line_a_minute_and_how_many_it_stands_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    grumble = Grumble("trouble", clock)
    with caplog.at_level(logging.WARNING, "vllm.kvplugin.nixl"):
        for i in range(1000):
            grumble(f"number {i}")
        assert caplog.records[0].getMessage() == "trouble: number 0"
        assert len(caplog.records) == 1
        clock.now += EVERY_S
        grumble("another")
        assert caplog.records[-1].getMessage() == (
            "trouble (1000 since the last such line): another"
        )


def test_strangers_do_not_write_lines_of_their_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "vllm.kvplugin.nixl"):
        Grumble("trouble", Clock())("a\nERROR \x1b[31m forged" + "x" * 10_000)
    [record] = caplog.records
    assert record.getMessage().startswith(r"trouble: a\nERROR \x1b[31m forged")
    assert len(record.getMessage()) < 1000
