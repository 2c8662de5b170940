"""What an explanation of a lookup says."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class LostHit(StrEnum):
    """Why tokens were not hit."""

    NEVER_CACHED = "never cached"
    """Nobody computed this prefix, as far back as the history reaches."""
    NEVER_CACHED_OR_EVICTED = "never cached or evicted"
    """Not in the cache; which of the two is unknown without a `LookupHistory`."""
    EVICTED = "evicted"
    """It was cached and is gone: evicted, taken out as invalid, or reset."""
    OTHER_IDENTITY = "other identity"
    """The same tokens are cached under another salt, adapter, weight epoch or media;
    the detail names what differs."""
    MISSING_STATE = "missing state"
    """The prefix was computed, but a state group kept no checkpoint at its end."""
    WINDOW_GAP = "window gap"
    """The prefix was computed, but a window or chunk group does not have all blocks
    that the next token reads."""
    DRAFT_DROP = "draft drop"
    """The draft model needs the block behind the hit cached too, and it is not."""
    ROUNDING = "rounding"
    """This group has it, but hits are multiples of all groups' block sizes."""
    PARTIAL_BLOCK = "partial block"
    """The tail of the prompt fills no block of this group."""
    LAST_TOKEN = "last token"  # noqa: S105  # not a password
    """The block of the last token: that token must be computed for its logits."""
    SKIPPED = "skipped"
    """A hit that the request did not want (`skip_reading_prefix_cache`)."""
    DISABLED = "disabled"
    """There is no prefix cache."""
    OTHER_GROUP = "other group"
    """This group could have hit it; the detail names those that could not."""
    UNPROVEN = "unproven"
    """Cached under the same hash, but not for the same tokens (hash formats that
    need a token check)."""
    UNHASHED = "unhashed"
    """A full block for which the request brings no hash."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Tokens [start, stop) of a request were not hit, for one reason."""

    start: int
    stop: int
    reason: LostHit
    group: int | None = None
    """Whose reason it is; None: of the whole lookup."""
    detail: str = ""
    """More, in words; may be empty."""

    @property
    def tokens(self) -> int:
        """Tokens lost."""
        return self.stop - self.start

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "reason": self.reason.name,
            "tokens": self.tokens,
            "start": self.start,
            "stop": self.stop,
            "group": self.group,
            "detail": self.detail,
        }

    def __str__(self) -> str:
        detail = f": {self.detail}" if self.detail else ""
        return f"{self.tokens} {self.reason} [{self.start}, {self.stop}){detail}"


@dataclass(frozen=True, slots=True)
class GroupExplanation:
    """One group's part in a lookup."""

    group: int
    kind: str
    """Attention type, as in KV events."""
    alone_tokens: int
    """Tokens that this group would have hit if it were the only one."""
    losses: tuple[Loss, ...]
    """Why this group hit no more: in order, without a gap or an overlap, from the
    last token that was hit to the end of the request."""

    @property
    def lost_by_reason(self) -> dict[LostHit, int]:
        """Tokens lost to each reason, in the order of their first token."""
        return tokens_by_reason(self.losses)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "group": self.group,
            "kind": self.kind,
            "alone_tokens": self.alone_tokens,
            "losses": [loss.as_dict() for loss in self.losses],
        }

    def __str__(self) -> str:
        losses = "; ".join(map(str, self.losses)) or "nothing lost"
        return f"group {self.group} {self.kind}, alone {self.alone_tokens}: {losses}"


@dataclass(frozen=True, slots=True)
class LookupExplanation:
    """Why a prefix hit was not longer."""

    request_id: str
    queried_tokens: int
    """All tokens of the request, those that no cache could serve included."""
    hit_tokens: int
    losses: tuple[Loss, ...]
    """The same for all groups together: of each stretch of tokens the reason of the
    first group that could not hit it, never `OTHER_GROUP`."""
    groups: tuple[GroupExplanation, ...]

    @property
    def lost_tokens(self) -> int:
        """Tokens that were not hit; the losses of each group add up to this."""
        return self.queried_tokens - self.hit_tokens

    @property
    def lost_by_reason(self) -> dict[LostHit, int]:
        """Tokens lost to each reason, in the order of their first token."""
        return tokens_by_reason(self.losses)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "request_id": self.request_id,
            "queried_tokens": self.queried_tokens,
            "hit_tokens": self.hit_tokens,
            "lost_tokens": self.lost_tokens,
            "losses": [loss.as_dict() for loss in self.losses],
            "groups": [group.as_dict() for group in self.groups],
        }

    def __str__(self) -> str:
        """One line for the request and one a group."""
        sums = self.lost_by_reason.items()
        lost = ", ".join(f"{tokens} {reason}" for reason, tokens in sums)
        head = (
            f"request {self.request_id}: {self.hit_tokens} of {self.queried_tokens} "
            f"tokens hit; lost: {lost or 'nothing'}"
        )
        return "\n".join([head, *(f"  {group}" for group in self.groups)])


def tokens_by_reason(losses: Iterable[Loss]) -> dict[LostHit, int]:
    """Tokens lost to each reason, in the order of first appearance."""
    sums: dict[LostHit, int] = {}
    for loss in losses:
        sums[loss.reason] = sums.get(loss.reason, 0) + loss.tokens
    return sums


def merged(losses: Iterable[Loss]) -> tuple[Loss, ...]:
    """Adjacent losses that differ in nothing but their place as one, empty ones left
    out; `losses` are in the order of their tokens."""
    result: list[Loss] = []
    for loss in losses:
        last = result[-1] if result else None
        if not loss.tokens:
            continue
        if last and (last.reason, last.group, last.detail) == (
            loss.reason,
            loss.group,
            loss.detail,
        ):
            result[-1] = Loss(
                last.start, loss.stop, loss.reason, loss.group, loss.detail
            )
        else:
            result.append(loss)
    return tuple(result)
