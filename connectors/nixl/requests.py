"""What the reading side remembers of a request."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from kvplugin.connectors.nixl.boundary import Grant
from kvplugin.connectors.nixl.params import ReadFrom
from kvplugin.connectors.nixl.peers import Peer
from kvplugin.contract import PeerRequestView


class Phase(StrEnum):
    """How far a request is with its one read."""

    OPENING = "opening"
    """Its peer, or its peer's answer about the lease, is waited for."""
    GRANTED = "granted"
    ORDERED = "ordered"
    """The read is under way, and the engine waits for it."""
    OVER = "over"
    """It has ended, well or not, or there will be none."""


@dataclass(slots=True, eq=False)
class Pull:
    """From a request's arrival to its end, or to that of its read."""

    request: PeerRequestView
    source: ReadFrom
    reader: str
    """Names this request to the peer."""
    came: float
    deadline: float
    """Until when a lookup waits for the grant."""
    phase: Phase = Phase.OPENING
    peer: Peer | None = None
    doubted: float = -math.inf
    """When the peer said that it does not know the lease."""
    forget_question: Callable[[], None] | None = None
    """Forgets the question that is under way."""
    patience: float = 0.0
    """Seconds that the peer had to open the lease."""
    has_held_a_step: bool = False
    """A step has waited for its grant."""
    grant: Grant | None = None
    agreed: int = 0
    """Tokens of the grant that are the request's."""
    answer: tuple[tuple[int, int], int] | None = None
    """To its last lookup: the boundary for a local hit and a length of the request."""
    asked_at: int | None = None
    """Tokens of the local hit at its last lookup, until it gets its row."""
    is_closed: bool = False
    """Its lease is given back, or gone."""
    unsound: list[int] = field(default_factory=list)
    """Blocks of a read that went well whose hashes promise more than they hold
    (`kvplugin.connectors.nixl.boundary.Cut.unsound`), until the request goes on."""

    @property
    def waits(self) -> bool:
        """Whether it is not known yet if anything can be read."""
        return self.phase is Phase.OPENING
