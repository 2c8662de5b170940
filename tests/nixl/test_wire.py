"""Messages of the side channel as bytes: typed, bounded, and whoever sends others is
told what is wrong."""

import math
import resource
from typing import Any

import msgpack
import pytest

from kvplugin.connectors.nixl import wire
from kvplugin.errors import IntegrityError

QUESTIONS: list[wire.Question] = [
    wire.Describe(),
    wire.Open(peer_id="e", lease="cmpl-1-0ff", reader="r"),
    wire.Renew(leases=[("a", "b"), ("c", "d")]),
    wire.Close(lease="a", reader="b"),
    wire.Status(),
]
GRANTED = wire.Granted(
    num_tokens=100,
    block_ids=[[1, 2], [0, 3]],
    generations=[[5, 6], [0, 2**40]],
    token_digests=[b"\0" * 16],
    seconds=30.0,
)
ANSWERS: list[wire.Answer] = [
    wire.Description(descriptor=b"\x80\xff"),
    GRANTED,
    wire.Gone(reason="ran out"),
    wire.Renewed(gone=["a"]),
    wire.Closed(),
    wire.Health(
        engine_id="e", role="both", leases=1, overdue_blocks=2, peers={"h:1": "ready"}
    ),
    wire.Refused(reason="no"),
]


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda q: type(q).__name__)
def test_questions_arrive_as_they_were(question: wire.Question) -> None:
    assert wire.decode_question(wire.encode(question)) == question


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda a: type(a).__name__)
def test_answers_arrive_as_they_were(answer: wire.Answer) -> None:
    assert wire.decode_answer(wire.encode(answer)) == answer


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda a: type(a).__name__)
def test_an_answer_is_no_question(answer: wire.Answer) -> None:
    with pytest.raises(IntegrityError, match="not a valid question"):
        wire.decode_question(wire.encode(answer))


def _open(**changed: Any) -> bytes:
    fields = {"type": "open", "peer_id": "e", "lease": "l", "reader": "r"} | changed
    packed: bytes = msgpack.packb({k: v for k, v in fields.items() if v is not ...})
    return packed


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (_open(lease=...), "lease"),
        (_open(lease=5), r"lease"),
        (_open(lease=b"l"), r"lease"),
        (_open(lease=None), r"lease"),
        (_open(lease="x" * (wire.MAX_NAME + 1)), "1024.*lease"),
        (_open(extra=1), "extra"),
        (_open(type="opem"), "opem"),
        (_open(type=...), "type"),
        (b"", "MessagePack"),
        (b"\xc1", "MessagePack"),
        (b"\x93\x01", "MessagePack"),
        (_open() + b"\0", "extra data"),
        (b"\xc0", "question"),
        (b"\x90", "question"),
        (msgpack.packb({1: 2}), "int"),
        (b"\x81\xa2\xed\xa0\x01", "utf-8"),
        (b"\xd6\xff\0\0\0\1", "question"),
        (b"\xc7\x01\x05\0", "question"),
        (msgpack.packb({"type": "renew", "leases": [["a"]]}), "leases"),
        (
            msgpack.packb({"type": "renew", "leases": [["a", "b"]] * 257}),
            "256.*leases",
        ),
    ],
)
def test_what_is_no_question_is_refused_by_name(data: bytes, named: str) -> None:
    with pytest.raises(IntegrityError, match=f"(?i){named}"):
        wire.decode_question(data)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"num_tokens": -1}, "num_tokens"),
        ({"num_tokens": 1.5}, "num_tokens"),
        ({"num_tokens": True}, "num_tokens"),
        ({"num_tokens": 2**63}, "num_tokens"),
        ({"seconds": math.nan}, "seconds"),
        ({"seconds": math.inf}, "seconds"),
        ({"seconds": -0.1}, "seconds"),
        ({"seconds": "30"}, "seconds"),
        ({"block_ids": [[-1]]}, "block_ids"),
        ({"block_ids": [1]}, "block_ids"),
        ({"block_ids": {"0": [1]}}, "block_ids"),
        ({"generations": [["1"]]}, "generations"),
        ({"token_digests": ["text"]}, "token_digests"),
    ],
)
def test_what_is_no_granted_lease_is_refused_by_name(
    changed: dict[str, Any], named: str
) -> None:
    fields = msgpack.unpackb(wire.encode(GRANTED)) | changed
    with pytest.raises(IntegrityError, match=named):
        wire.decode_answer(msgpack.packb(fields))


def test_a_message_that_is_too_large_is_not_looked_at() -> None:
    data = bytes(wire.MAX_QUESTION_BYTES + 1)
    with pytest.raises(IntegrityError, match=f"more than {wire.MAX_QUESTION_BYTES}"):
        wire.decode_question(data)


NESTED = b"\xdd\x00\x0f\xff\xff" * 1000
BOMBS = {
    "lists in lists": NESTED.ljust(wire.MAX_QUESTION_BYTES, b"\xc0"),
    "maps in maps": (b"\xdf\x00\x0f\xff\xff\xa1x" * 500).ljust(1 << 19, b"\xc0"),
    "deep": b"\x91" * 100_000 + b"\xc0",
    "deep maps": b"\x81\xa1x" * 100_000 + b"\xc0",
    "one long list": b"\xdd\xff\xff\xff\xff",
    "one long text": b"\xdb\xff\xff\xff\xff",
    "one long binary": b"\xc6\xff\xff\xff\xff",
    "one long extension": b"\xc9\xff\xff\xff\xff\x01",
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_announced_lengths_take_no_memory(bomb: bytes) -> None:
    """Nested announcements of 2**20 entries each would take 8 GB."""
    pages = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    with pytest.raises(IntegrityError, match="MessagePack"):
        wire.decode_question(bomb)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - pages < 20_000
