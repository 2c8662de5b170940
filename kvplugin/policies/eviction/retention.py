"""Protect what requests ask to keep: by priority, by time, by session."""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final, cast

import msgspec

from kvplugin.errors import IntegrityError, check_ranges
from kvplugin.policies.eviction.base import BlockContext, BlockInfo, EvictionPolicy
from kvplugin.policies.eviction.protecting import Protecting, Protection
from kvplugin.policies.eviction.ranked_set import Rank

_MOST_CLAIMS: Final = 8
"""Claims that a block remembers, the strongest ones and of equals the latest."""
_MOST_ENDED: Final = 4096
"""Sessions remembered that have ended."""
_SLACK: Final = 1024
"""Entries of claims that are gone which are never worth a clean-up."""


class RetentionOptions(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """What is protected, and how much of it."""

    max_protected_share: float = 0.5
    """Most blocks that only their protection keeps, as a share of the pool."""
    max_session_share: float = 1.0
    """Share of the pool that one session may claim, blocks in use included; what it
    claims first counts, so the head of its prefix."""
    protect_sessions: bool = False
    """Protect the blocks of every session until it ends or is silent for long."""
    session_ttl: float = 600.0
    """Seconds after its last request that such a session is protected, and after which
    it may begin anew if it has ended."""

    def __post_init__(self) -> None:
        check_ranges(
            self,
            {
                "max_protected_share": (0, 1),
                "max_session_share": (0, 1),
                "session_ttl": (0, 1e12),
            },
        )


_DEFAULTS: Final = RetentionOptions()


@dataclass(slots=True, eq=False)
class _Claim:
    """That blocks be protected; of a session, or of all requests that ask the same."""

    key: object
    session: str | None
    priority: int
    expires_at: float
    blocks: set[int] = field(default_factory=set)
    """Keyed blocks that remember it."""

    @property
    def worth(self) -> tuple[int, float]:
        return self.priority, self.expires_at


class Retention(Protecting):
    """Protects blocks that were inserted or hit by requests with

    - a priority above 0, the higher the stronger, until `expires_at` if that is given;
    - an `expires_at` alone, until then;
    - a session, if `protect_sessions` is set, until `session_ttl` after its last call.

    Over the budget those of least priority go first, then of earliest expiry, then in
    the order of the inner policy.

    All requests of a session make one claim: each can raise its priority and its
    expiry, for all of its blocks. A request with `ends_session` drops the claim at once
    and makes none, so what it releases later is not protected either, unless somebody
    else claims it. Nor do other requests of the session that still run: what has ended
    claims nothing until it was silent for `session_ttl` (4,096 sessions are
    remembered). A block remembers eight claims and counts as its strongest; a prefix
    is claimed as a whole, so a block has the claims of its descendants.

    Args:
        inner: ranks the blocks.
        options: what is protected, and how much of it.
    """

    needs_info = False
    needs_demand = False

    def __init__(
        self, inner: EvictionPolicy, options: RetentionOptions = _DEFAULTS
    ) -> None:
        super().__init__(inner, options.max_protected_share)
        self._options = options
        self._now = 0.0
        self._claims: dict[object, _Claim] = {}
        """Live ones, by session, or by priority and expiry."""
        self._claims_of: dict[int, list[_Claim]] = {}
        """By block."""
        self._expiries: list[tuple[float, int, _Claim]] = []
        """A heap with one entry, perhaps too early, for each claim that expires; and
        for claims that are gone, but not many more of them."""
        self._num_claims = 0
        self._ended: OrderedDict[str, float] = OrderedDict()
        """When sessions that have ended may begin anew, the earliest first."""

    def bind(self, num_blocks: int, info: Callable[[int], BlockInfo]) -> None:
        super().bind(num_blocks, info)
        self._session_budget = int(num_blocks * self._options.max_session_share)

    def insert(self, ids: Sequence[int], ctx: BlockContext) -> None:
        super().insert(ids, ctx)
        self._heed(ids, ctx)

    def hit(self, ids: Sequence[int], ctx: BlockContext) -> None:
        super().hit(ids, ctx)
        self._heed(ids, ctx)

    def step(
        self, now: float, soon: Iterable[bytes], dropped: Mapping[bytes, int]
    ) -> None:
        super().step(now, soon, dropped)
        self._now = now
        ended = []
        while self._expiries and self._expiries[0][0] <= now:
            claim = heapq.heappop(self._expiries)[-1]
            if claim.expires_at <= now:
                ended.append(claim)
            else:
                self._expect_end(claim)
        self._end(ended)

    def check(self) -> None:
        super().check()
        for claim in self._claims.values():
            if not claim.blocks:
                raise IntegrityError("retention: a claim without blocks is kept")
            if any(claim not in self._claims_of[block] for block in claim.blocks):
                raise IntegrityError("retention: a block does not know its claim")
        pairs = sum(len(claim.blocks) for claim in self._claims.values())
        if pairs != sum(len(claims) for claims in self._claims_of.values()):
            raise IntegrityError("retention: claims and blocks disagree")

    def _protection(self, block: int) -> Protection | None:
        # Blocks of a prefix have the same claims, so that they are ranked together.
        claims = self._claims_of.get(block)
        return (tuple(claims), 0) if claims else None

    def _worth(self, what: Hashable) -> Rank:
        """Of blocks that all have these claims."""
        return max(claim.worth for claim in cast("tuple[_Claim, ...]", what))

    def _lose_keys(self, ids: Sequence[int]) -> None:
        for block in ids:
            for claim in self._claims_of.pop(block, ()):
                self._leave(claim, block)

    def _heed(self, ids: Sequence[int], ctx: BlockContext) -> None:
        if ctx.ends_session:
            if ctx.session is not None:
                self._end_session(ctx.session)
        elif (claim := self._claim_for(ctx)) is not None:
            for block in ids:
                self._remember(block, claim)
            if not claim.blocks:
                self._claims.pop(claim.key)

    def _claim_for(self, ctx: BlockContext) -> _Claim | None:
        """The claim that a request makes, made or renewed; None for none."""
        expires_at = inf if ctx.expires_at is None else ctx.expires_at
        priority = max(ctx.priority, 0)
        if ctx.expires_at is None and not priority:
            if ctx.session is None or not self._options.protect_sessions:
                return None
            expires_at = self._now + self._options.session_ttl
        if expires_at <= self._now or self._has_ended(ctx.session):
            return None
        key = (priority, expires_at) if ctx.session is None else ctx.session
        claim = self._claims.get(key)
        if claim is None:
            claim = self._claims[key] = _Claim(key, ctx.session, priority, expires_at)
            self._expect_end(claim)
        claim.priority = max(claim.priority, priority)
        claim.expires_at = max(claim.expires_at, expires_at)
        return claim

    def _expect_end(self, claim: _Claim) -> None:
        if claim.expires_at < inf:
            self._num_claims += 1
            heapq.heappush(self._expiries, (claim.expires_at, self._num_claims, claim))
            if len(self._expiries) > 2 * len(self._claims) + _SLACK:
                live = self._claims.get
                self._expiries = [e for e in self._expiries if live(e[2].key) is e[2]]
                heapq.heapify(self._expiries)

    def _remember(self, block: int, claim: _Claim) -> None:
        claims = self._claims_of.get(block, [])
        if claim in claims:
            return
        if claim.session is not None and len(claim.blocks) >= self._session_budget:
            return
        if len(claims) == _MOST_CLAIMS:
            weakest = min(claims, key=lambda claim: claim.worth)
            if weakest.worth > claim.worth:
                return
            claims.remove(weakest)
            self._leave(weakest, block)
        self._claims_of[block] = claims
        claims.append(claim)
        claim.blocks.add(block)

    def _end_session(self, session: str) -> None:
        claim = self._claims.get(session)
        self._end([claim] if claim else [])
        self._ended[session] = self._now + self._options.session_ttl
        self._ended.move_to_end(session)
        if len(self._ended) > _MOST_ENDED:
            self._ended.popitem(last=False)

    def _has_ended(self, session: str | None) -> bool:
        """Whether a request of this session may claim nothing. It shows that the
        session is not silent yet."""
        until = None if session is None else self._ended.pop(session, None)
        if session is None or until is None or until <= self._now:
            return False
        self._ended[session] = self._now + self._options.session_ttl
        return True

    def _end(self, ended: Iterable[_Claim]) -> None:
        for claim in ended:
            for block in claim.blocks:
                claims = self._claims_of[block]
                claims.remove(claim)
                if not claims:
                    del self._claims_of[block]
            if self._claims.get(claim.key) is claim:
                del self._claims[claim.key]
            self._reconsider(claim.blocks)
            claim.blocks.clear()

    def _leave(self, claim: _Claim, block: int) -> None:
        claim.blocks.discard(block)
        if not claim.blocks and self._claims.get(claim.key) is claim:
            del self._claims[claim.key]
