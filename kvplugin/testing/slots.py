"""What a slot of a block may hold, and what a row of blocks is."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

STATE_SLOT: Final = 0
"""Where a block of a state group holds its state."""
WRONG: Final = -1
"""The history of bytes that are not what they should be."""


class ContentError(AssertionError):
    """Somebody reads or writes what is not theirs; the message says who and where."""


class Void(Enum):
    """What a slot holds if nobody's bytes."""

    UNWRITTEN = "never written bytes"
    POISONED = "poison (the block was freed or handed out anew)"
    ZEROED = "zeros"
    INVALID = "bytes of a failed load"
    """The only ones that may be read: the engine hears of the failure later and must
    discard what came of it."""
    DRAFTED = "a draft model's scratch bytes"


class Slot(NamedTuple):
    """The bytes of one token, or the state after it."""

    group: int
    position: int
    history: int
    """See `rules.Identity`."""
    writer: str
    """Request that computed it; of no weight in comparisons."""


Content = Slot | Void


@dataclass(frozen=True, slots=True)
class BlockContent:
    """A copy of one block."""

    fill: Void
    slots: dict[int, Content]


@dataclass(frozen=True, slots=True)
class Row:
    """A request's blocks in one group, as its worker knows them."""

    request_id: str
    blocks: Sequence[int]
    grants: Sequence[int] | None = None
    """`ContentModel.grants()` of the time at which the blocks were assigned; a block
    that was handed out since is not the request's any more. None: not checked."""


def describe(found: Content, wanted: int) -> str:
    if isinstance(found, Void):
        return found.value
    if found.history == wanted:
        return f"the right tokens, but as {found}"
    return f"other bytes: {found}"
