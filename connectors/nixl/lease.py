"""One lease: what it is about, who reads it, and until when."""

import secrets
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

from kvplugin.connectors.nixl.wire import Granted

MOST_READERS: Final = 1024
"""Of one lease over its life."""
_SECRET_BYTES: Final = 16
_LONGEST_ID: Final = 128
"""Characters of a request's id in the name of its lease, for people's eyes."""


class End(Enum):
    """How a lease ended."""

    CLOSED = auto()
    EXPIRED = auto()
    REVOKED = auto()


@dataclass(slots=True)
class Lease:
    """Of one request's blocks."""

    name: str
    request_id: str
    seconds: float
    granted: Granted
    """What readers are told. Generations of leased blocks do not change, so it does
    not either."""
    blocks: frozenset[int]
    deadline: float
    open_by: set[str] = field(default_factory=set)
    closed_by: set[str] = field(default_factory=set)
    end: End | None = None
    """None: it is live."""

    def may_remember(self, reader: str) -> bool:
        """Whether it knows this reader, or can take one more."""
        known = reader in self.open_by or reader in self.closed_by
        return known or len(self.open_by) + len(self.closed_by) < MOST_READERS


def name_for(request_id: str) -> str:
    """A new lease's name, which nobody can guess. Ids of requests are clients' own,
    so they are cut and cleaned: names travel between engines."""
    readable = "".join(
        letter if letter.isascii() and letter.isprintable() and letter != " " else "_"
        for letter in request_id[:_LONGEST_ID]
    )
    return f"{readable}-{secrets.token_hex(_SECRET_BYTES)}"
