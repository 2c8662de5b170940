"""What the scheduler half remembers of a request."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvplugin.contract import RequestView

if TYPE_CHECKING:
    from kvplugin.connectors.offload.admissions import Admission


@dataclass(slots=True)
class RequestState:
    """From its first lookup to its end."""

    request: RequestView
    asked_at: int | None = None
    """Tokens of the local hit at its last lookup, until it is admitted."""
    answer: tuple[tuple[int, ...], tuple[int, int]] | None = None
    """To its last lookup, behind all that it depends on; see `Loads.reach`."""
    admission: "Admission | None" = None
    """None while nothing of it is stored."""
    admitted_after: int = -1
    """Number of the last plan before its last admission."""
    epoch: int | None = None
    """Of the tier when it was last admitted from the start: what is in its row may be
    of weights that have changed since."""
    wait_until: float | None = None
    """When a lookup stops waiting for transfers of others."""
    load_failed: bool = False
    """A load failed: this request computes the rest itself."""
    stores: set[int] = field(default_factory=set)
    """Ids of its store jobs under way."""
