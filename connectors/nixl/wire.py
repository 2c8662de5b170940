"""What engines say to each other on the side channel.

A client asks, a server answers, one answer a question. How these messages travel, and
how they are signed, is the business of `kvplugin.connectors.nixl.frames` and `auth`.
"""

from typing import Annotated, Any, Final, TypeAlias

import msgpack
import msgspec

from kvplugin.errors import IntegrityError
from kvplugin.wire import convert, unpack

MAX_BYTES: Final = 16 << 20
"""Of an answer. A larger one is refused unread."""
MAX_QUESTION_BYTES: Final = 1 << 20
"""Of a question: more than `MAX_PAIRS` leases need."""
MAX_PAIRS: Final = 256
"""Leases that one `Renew` names."""
MAX_NAME: Final = 1024
"""Characters of the name of a lease, a reader or an engine."""
MAX_SECONDS: Final = 86_400.0
"""Of a lease, as in `kvplugin.connectors.nixl.config`."""

Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS)]


class _Wire(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="type",
):
    """Tagged, with named fields."""


# -- questions -------------------------------------------------------------------------


class Describe(_Wire, frozen=True, tag="describe"):
    """What are you? Answered by `Description`."""


class Open(_Wire, frozen=True, tag="open"):
    """May I read the blocks of this lease? Answered by `Granted` or `Gone`. A granted
    lease runs from now on until it is closed by all who opened it, or no reader has
    renewed it for its duration."""

    peer_id: Name
    """Of the very process that is asked (`EngineDescriptor.peer_id`): another one at
    this address answers `Gone`."""
    lease: Name
    """``remote_request_id`` of the request's ``kv_transfer_params``."""
    reader: Name
    """Names the reading request, uniquely over all engines."""


class Renew(_Wire, frozen=True, tag="renew"):
    """These leases are still wanted. Answered by `Renewed`."""

    leases: Annotated[list[tuple[Name, Name]], msgspec.Meta(max_length=MAX_PAIRS)]
    """(lease, reader)."""


class Close(_Wire, frozen=True, tag="close"):
    """This reader is done with the lease, opened or not. Answered by `Closed`."""

    lease: Name
    reader: Name


class Status(_Wire, frozen=True, tag="status"):
    """How are you? Answered by `Health`; for people and probes."""


Question: TypeAlias = Describe | Open | Renew | Close | Status


# -- answers ---------------------------------------------------------------------------


class Description(_Wire, frozen=True, tag="description"):
    """An encoded `kvplugin.connectors.nixl.descriptor.EngineDescriptor`."""

    descriptor: bytes


class Granted(_Wire, frozen=True, tag="granted"):
    """Read these."""

    num_tokens: Count
    """Whose KV there is."""
    block_ids: list[list[Count]]
    """By group: the end of the row; its last entry holds the last token, or, of a
    group of states, the state after it. 0 stands for a block that is not there."""
    generations: list[list[Count]]
    """Of each of these blocks."""
    token_digests: list[bytes]
    """Chained digests of the tokens (`kvplugin.connectors.nixl.prompt`)."""
    seconds: Seconds
    """Until the lease ends unless it is renewed."""


class Gone(_Wire, frozen=True, tag="gone"):
    """There is no such lease (any more), or it is another engine's."""

    reason: str


class Renewed(_Wire, frozen=True, tag="renewed"):
    """All but these."""

    gone: list[Name]


class Closed(_Wire, frozen=True, tag="closed"):
    """Noted; also of a lease that is gone."""


class Health(_Wire, frozen=True, tag="health"):
    """For people and probes; numbers and names only, no addresses."""

    engine_id: str
    role: str
    leases: int
    overdue_blocks: int
    peers: dict[str, str]
    """Address -> ``ready``, ``dead: reason`` or ``refused: reasons``."""


class Refused(_Wire, frozen=True, tag="refused"):
    """Not answered: not signed, not understood, or the server cannot."""

    reason: str


Answer: TypeAlias = Description | Granted | Gone | Renewed | Closed | Health | Refused


# -- as bytes --------------------------------------------------------------------------


def encode(message: Question | Answer) -> bytes:
    """The bytes of a message."""
    packed: bytes = msgpack.packb(msgspec.to_builtins(message, builtin_types=(bytes,)))
    return packed


def decode_question(data: bytes) -> Question:
    """The question in `data`.

    Raises:
        IntegrityError: the bytes are none; says where they differ.
    """
    return _typed(data, MAX_QUESTION_BYTES, Question, "question")


def decode_answer(data: bytes) -> Answer:
    """The answer in `data`.

    Raises:
        IntegrityError: the bytes are none; says where they differ.
    """
    return _typed(data, MAX_BYTES, Answer, "answer")


def _typed(data: bytes, max_bytes: int, kind: Any, name: str) -> Any:
    try:
        return convert(unpack(data, max_bytes), kind)
    except (IntegrityError, msgspec.ValidationError) as error:
        raise IntegrityError(f"not a valid {name}: {error}") from error
