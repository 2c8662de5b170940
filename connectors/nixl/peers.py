"""What is known of other engines, by the address of their side channel.

A peer is asked to describe itself when the first request names its address, and is
from then on *ready*, with an agreement on how its blocks are read; or *refused*, for
reasons that hold as long as it is the same process; or *dead*, for a while, as it did
not answer. Nobody waits for one that is refused or dead. It is asked again where a
request names another engine at the address, or says that its lease is unknown there:
it may have been restarted. Others are not affected by that.

Worker halves hear of a peer when it becomes ready, and that it is gone when another
has taken its place, or it is dead, and the last read from it has ended.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from kvplugin.connectors.metrics import Counters
from kvplugin.connectors.negotiate import Agreement
from kvplugin.connectors.nixl.channel import Reply
from kvplugin.connectors.nixl.config import NixlConfig
from kvplugin.connectors.nixl.descriptions import Descriptions, Fits, Unfit
from kvplugin.connectors.nixl.descriptor import EngineDescriptor
from kvplugin.connectors.nixl.grumble import Grumble
from kvplugin.connectors.nixl.messages import Peer as Announced
from kvplugin.connectors.nixl.questions import Questions
from kvplugin.connectors.nixl.wire import Describe, Description, Refused

logger = logging.getLogger("vllm.kvplugin.nixl")

MOST_PEERS: Final = 1024
"""Addresses that are remembered: clients make them up."""
_MOST_SHOWN: Final = 256
_LONGEST_REASON: Final = 2000
_RECENT_S: Final = 1.0
"""So long a description stands, whatever a request says of its peer."""
_HELD_S: Final = 0.1
"""Between two attempts to ask a peer, where only a limit of ours is in the way."""
_STRANGER: Final = "an address that a client has named"
_FAILURES: Final = 2
"""Failed reads in a row after which a peer counts as dead."""


class Standing(StrEnum):
    ASKED = "asked"
    READY = "ready"
    REFUSED = "refused"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine that can be read."""

    address: str
    descriptor: EngineDescriptor
    encoded: bytes
    agreement: Agreement

    @property
    def peer_id(self) -> str:
        """This very process tree."""
        return self.descriptor.peer_id

    @property
    def block_sizes(self) -> list[int]:
        """By group."""
        return [group.block_size for group in self.descriptor.groups]


class Outlook(NamedTuple):
    """What a request may expect of its peer."""

    peer: Peer | None = None
    """Ready: it can be asked for leases."""
    reason: str = ""
    """Not empty: nothing, and why. If there is neither, the answer is not there yet."""
    answers: bool = True
    """Whether it is one that can be told anything."""


@dataclass(slots=True)
class _Entry:
    standing: Standing = Standing.ASKED
    peer: Peer | None = None
    engine_id: str = ""
    """Of the last description, refused or not."""
    reason: str = ""
    speaks: bool = True
    """It is an engine of ours."""
    until: float = math.inf
    """When it is to be asked again, if anybody wants it."""
    described_at: float = -math.inf
    asked_until: float | None = None
    """When its answer is overdue; None while it is not asked, infinity while the answer
    is there and waits for a step."""
    forget: Callable[[], None] = field(default=lambda: None)
    """Forgets that question."""
    failures: int = 0
    """Reads that have failed in a row."""
    has_described: bool = False
    """It has described itself, ever; else it may be an address that a client made
    up."""
    held_until: float = -math.inf
    """A limit of this engine keeps it from being asked; so long, it is not tried."""


class News(NamedTuple):
    """What worker halves must know before the next reads."""

    new: list[Announced]
    gone: list[str]


class Peers:
    """All peers of a reading engine.

    Args:
        reader: it.
        config: of its connector.
        questions: to other engines.
        counters: of the connector.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        reader: EngineDescriptor,
        config: NixlConfig,
        questions: Questions,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self.states: Mapping[str, str] = {}
        """For people, by address; replaced, never changed: other threads read it."""
        self._descriptions = Descriptions(reader)
        self._timeout = config.handshake_timeout_s
        self._ttl = config.dead_peer_ttl_s
        self._questions = questions
        self._counters = counters
        self._clock = clock
        self._refusals = Grumble(_STRANGER, clock)
        self._silences = Grumble(_STRANGER, clock)
        self._entries: dict[str, _Entry] = {}
        self._announced: dict[str, bytes] = {}
        """Descriptors that worker halves know, by peer id."""
        self._new: list[Announced] = []
        self._has_news = False
        self._reads: Counter[str] = Counter()
        """Reads under way, by peer id."""

    def look(
        self, address: str, engine_id: str, came: float, doubted: float = -math.inf
    ) -> Outlook:
        """What a request may expect; asks the peer where that is not known.

        Args:
            address: of the peer's side channel.
            engine_id: that the request names.
            came: when the request did.
            doubted: when it found that the peer may not be what it was.
        """
        now = self._clock()
        entry = self._entries.get(address)
        if entry is None:
            if not self._has_room():
                return Outlook(reason=f"{MOST_PEERS} engines are in use already")
            entry = self._entries[address] = _Entry()
        if entry.asked_until is not None and now >= entry.asked_until:
            self._is_dead(address, entry, "it does not answer")
        if entry.standing is Standing.DEAD and now < entry.until:
            return Outlook(reason=entry.reason)
        wrong = entry.engine_id != engine_id if entry.engine_id else False
        need = max(doubted, came if wrong else -math.inf) - _RECENT_S
        if entry.standing is Standing.REFUSED and entry.described_at > need:
            if now >= entry.until:
                self._ask(address, entry)
            return Outlook(reason=entry.reason, answers=entry.speaks)
        if entry.standing is Standing.READY and entry.described_at > need:
            if not wrong:
                return Outlook(entry.peer)
            there = entry.engine_id
            return Outlook(reason=f"at {address} is engine {there}, not {engine_id}")
        self._ask(address, entry)
        return Outlook()

    def _has_room(self) -> bool:
        """Forget an address, one of no use first, if there are too many."""
        if len(self._entries) < MOST_PEERS:
            return True
        idle = [a for a, e in self._entries.items() if e.asked_until is None]
        idle = [a for a in idle if not self._is_read(self._entries[a])]
        if not idle:
            return False
        useless = (a for a in idle if self._entries[a].standing is not Standing.READY)
        entry = self._entries.pop(next(useless, idle[0]))
        entry.peer = None
        self._changed()
        return True

    def _is_read(self, entry: _Entry) -> bool:
        return entry.peer is not None and self._reads[entry.peer.peer_id] > 0

    def knows(self, peer: Peer) -> bool:
        """Whether it is still what is at its address."""
        entry = self._entries.get(peer.address)
        current = None if entry is None else entry.peer
        return current is not None and current.peer_id == peer.peer_id

    def take_in(self) -> bool:
        """Look into a description that has waited for this step.

        Returns:
            Whether there was one.
        """
        return self._descriptions.look()

    # -- asking --------------------------------------------------------------------

    def _ask(self, address: str, entry: _Entry) -> None:
        if entry.asked_until is not None or self._clock() < entry.held_until:
            return
        if entry.standing is Standing.DEAD:
            entry.standing = Standing.ASKED
        entry.asked_until = self._clock() + 2 * self._timeout
        entry.forget = self._questions.ask(
            address,
            Describe(),
            self._timeout,
            lambda reply: self._answered(address, entry, reply),
        )

    def _answered(self, address: str, entry: _Entry, reply: Reply) -> None:
        entry.asked_until = None
        answer = reply.answer
        if isinstance(answer, Description):
            self._counters.add("handshakes")
            self._described(address, entry, answer.descriptor)
        elif answer is None and reply.local:
            entry.held_until = self._clock() + _HELD_S
        elif answer is None and not reply.final:
            self._is_dead(address, entry, reply.error)
        else:
            why = reply.error or f"it answers with {type(answer).__name__}"
            if isinstance(answer, Refused):
                why = answer.reason
            entry.engine_id = ""
            self._is_refused(address, entry, why, speaks=not reply.final)

    def _described(self, address: str, entry: _Entry, encoded: bytes) -> None:
        entry.has_described = True
        if entry.peer is not None and entry.peer.encoded == encoded:
            entry.described_at = self._clock()
        elif alias := self._says(encoded):
            self._found(
                address, entry, encoded, Fits(alias.descriptor, alias.agreement)
            )
        elif refused := self._descriptions.refusal(encoded):
            self._found(address, entry, encoded, refused)
        else:
            self._is_to_be_read(address, entry, encoded)

    def _says(self, encoded: bytes) -> Peer | None:
        """One that has said the same at another address."""
        known = (e.peer for e in self._entries.values() if e.peer is not None)
        return next((peer for peer in known if peer.encoded == encoded), None)

    def _is_to_be_read(self, address: str, entry: _Entry, encoded: bytes) -> None:
        """Have the description looked into when it is its turn; the entry stays asked
        until then."""

        def then(found: Fits | Unfit) -> None:
            if entry.asked_until == math.inf:  # it has not died meanwhile
                entry.asked_until = None
                self._found(address, entry, encoded, found)

        entry.asked_until = math.inf
        if not self._descriptions.add(encoded, then):
            entry.asked_until = None  # whoever wants it asks again

    def _found(
        self, address: str, entry: _Entry, encoded: bytes, found: Fits | Unfit
    ) -> None:
        if isinstance(found, Unfit):
            entry.engine_id = found.engine_id
            self._is_refused(address, entry, found.reason)
            return
        entry.engine_id = found.descriptor.engine_id
        if self._announced.get(found.descriptor.peer_id, encoded) != encoded:
            why = "another engine says that it is this very process"
            self._is_refused(address, entry, why)
            return
        self._is_ready(address, entry, Peer(address, found[0], encoded, found[1]))

    def _is_ready(self, address: str, entry: _Entry, peer: Peer) -> None:
        entry.standing, entry.peer, entry.reason = Standing.READY, peer, ""
        entry.described_at, entry.until, entry.speaks = self._clock(), math.inf, True
        entry.failures = 0
        if peer.peer_id not in self._announced:
            self._announced[peer.peer_id] = peer.encoded
            self._new.append(Announced(peer.peer_id, peer.encoded))
        logger.info(
            "engine %s at %s can be read: %s",
            peer.descriptor.engine_id,
            address,
            peer.agreement.summary,
        )
        self._changed()

    def _is_refused(
        self, address: str, entry: _Entry, why: str, *, speaks: bool = True
    ) -> None:
        why = f"engine at {address} cannot be read: {why[:_LONGEST_REASON]}"
        if entry.standing is not Standing.REFUSED or entry.reason != why:
            self._warn(entry, self._refusals, why)
        entry.standing, entry.peer, entry.reason = Standing.REFUSED, None, why
        entry.speaks, entry.described_at = speaks, self._clock()
        entry.until = self._clock() + self._ttl
        self._changed()

    def _is_dead(self, address: str, entry: _Entry, why: str) -> None:
        why = f"engine at {address} is not asked for {self._ttl:g} s: " + (
            why[:_LONGEST_REASON] or "it does not answer"
        )
        self._warn(entry, self._silences, why)
        entry.forget()
        entry.asked_until = None
        entry.standing, entry.peer, entry.reason = Standing.DEAD, None, why
        entry.until, entry.engine_id = self._clock() + self._ttl, ""
        self._changed()

    @staticmethod
    def _warn(entry: _Entry, grumble: Grumble, why: str) -> None:
        if entry.has_described:
            logger.warning("%s", why)
        else:
            grumble(why)

    # -- what reads tell -----------------------------------------------------------

    def died(self, peer: Peer, why: str) -> None:
        """The peer did not answer a question, or a read from it does not end."""
        entry = self._entries.get(peer.address)
        if entry is not None and entry.peer is peer:
            self._is_dead(peer.address, entry, why)

    def begins(self, peer: Peer) -> None:
        """A read from the peer is ordered."""
        self._reads[peer.peer_id] += 1

    def ended(self, peer: Peer, error: str = "") -> None:
        """A read from the peer has ended, well or because of it."""
        self._reads[peer.peer_id] -= 1
        if not self._reads[peer.peer_id]:
            del self._reads[peer.peer_id]
            self._has_news = True
        entry = self._entries.get(peer.address)
        if entry is None or entry.peer is not peer:
            return
        entry.failures = entry.failures + 1 if error else 0
        if entry.failures >= _FAILURES:
            self._is_dead(peer.address, entry, f"reads from it fail: {error}")

    def take_news(self) -> News:
        """What has changed for worker halves since the last call, which ends a step."""
        self._descriptions.next_step()
        if not self._has_news:
            return News([], [])
        self._has_news = False
        current = {e.peer.peer_id for e in self._entries.values() if e.peer is not None}
        gone = [
            peer_id
            for peer_id in self._announced
            if peer_id not in current and not self._reads[peer_id]
        ]
        for peer_id in gone:
            del self._announced[peer_id]
        new, self._new = self._new, []
        unheard = {peer.peer_id for peer in new}
        return News(
            [peer for peer in new if peer.peer_id in self._announced],
            [peer_id for peer_id in gone if peer_id not in unheard],
        )

    def _changed(self) -> None:
        self._has_news = True
        counts = Counter(entry.standing for entry in self._entries.values())
        self._counters.set("refused_peers", counts[Standing.REFUSED])
        self._counters.set("dead_peers", counts[Standing.DEAD])
        known = (
            (a, e) for a, e in self._entries.items() if e.standing is not Standing.ASKED
        )
        self.states = {
            address: f"{entry.standing}: {entry.reason}".removesuffix(": ")
            for (address, entry), _ in zip(known, range(_MOST_SHOWN), strict=False)
        }
