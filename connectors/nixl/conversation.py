"""One peer, as a client talks to it: what to send, what an answer means, what is late.

No sockets and no clock in here: `kvplugin.connectors.nixl.client` has them. First a
hello, whose answer brings the server's nonce, then any number of questions at a time.
A question that is not answered is asked again, so that one which a restart has
swallowed is not lost; a server that has restarted is noticed because it does not know
the nonce, and everything is signed again.

Leases that are kept are renewed here, and leases that are dropped closed: nobody waits
for those answers.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import UnionType
from typing import Final

from kvplugin.connectors.nixl import frames, stock, wire
from kvplugin.connectors.nixl.auth import Header, Signer, new_client, same
from kvplugin.connectors.nixl.channel import Reply
from kvplugin.connectors.nixl.kept import KeptLeases, Lease
from kvplugin.connectors.nixl.version import VERSION
from kvplugin.errors import IntegrityError

RESEND_S: Final = 1.0
"""After which a question is asked again, as long as it has time."""
CLOSE_S: Final = 10.0
"""For which closing a lease is tried."""
MAX_UNTOLD: Final = 64
"""Leases that a peer is told of with its first answer; others end by themselves."""
MAX_TRIES: Final = 10
"""Of one question: no peer makes us send for ever."""
MAX_ASKED: Final = 4096
"""Questions to one peer at a time."""

_SECRETS: Final = "set secret or secret_file to the same value on both"
_ANSWERS: Final[dict[type[wire.Question], type[wire.Answer] | UnionType]] = {
    wire.Describe: wire.Description,
    wire.Open: wire.Granted | wire.Gone,
    wire.Renew: wire.Renewed,
    wire.Close: wire.Closed,
    wire.Status: wire.Health,
}


@dataclass(slots=True, eq=False)
class _Asked:
    """A question on its way."""

    question: wire.Question
    deadline: float
    timeout: float
    ticket: int | None
    """None: nobody waits for the answer."""
    again: float = 0.0
    """When to send it (again)."""
    tries: int = 0
    tags: dict[int, bytes] = field(default_factory=dict)
    """Signature by sequence number, of each time that it was sent."""


class Conversation:
    """Everything between this engine and one address.

    Args:
        address: for messages.
        signer: of this engine's secret.
        reply: takes what becomes of questions that somebody waits for.
    """

    def __init__(
        self, address: str, signer: Signer, reply: Callable[[Reply], None]
    ) -> None:
        self._address = address
        self._signer = signer
        self._reply = reply
        self._nonce = b""
        self._client = new_client()
        self._sequence = itertools.count(1)
        self._hello_at = float("-inf")
        """When the next hello is due; endless: none is on its way."""
        self._is_ours = True
        self._asked: dict[int, _Asked] = {}
        self._numbers = itertools.count()
        self._fresh: deque[int] = deque()
        """Numbers of questions to send at once."""
        self._by_sequence: dict[int, int] = {}
        self._opens: dict[Lease, int] = {}
        self._kept = KeptLeases()
        self._untold: list[Lease] = []
        """Dropped before the peer has answered anything."""
        self._due = float("inf")
        """Nothing is to be done before."""
        self.is_silent = True
        """The last thing that happened is that it did not answer."""
        self.is_known = False
        """It has answered with this engine's secret."""
        self.is_held = False
        """A limit of this engine keeps it from being asked."""

    @property
    def is_idle(self) -> bool:
        """Nothing is under way, and no lease is kept."""
        return not self._asked and not self._kept

    # -- what is asked of us -----------------------------------------------------------

    def ask(
        self, ticket: int | None, question: wire.Question, timeout: float, now: float
    ) -> None:
        """Ask; answered, or failed, after `timeout` at the latest."""
        if len(self._asked) >= MAX_ASKED:
            why = f"{MAX_ASKED} questions to {self._address} are under way"
            self._end(ticket, why, local=True)
            return
        number = next(self._numbers)
        self._asked[number] = _Asked(question, now + timeout, timeout, ticket)
        self._fresh.append(number)
        self._due = min(self._due, now + timeout)
        if isinstance(question, wire.Open):
            self._opens[question.lease, question.reader] = number

    def keep(self, lease: str, reader: str, every: float, now: float) -> None:
        """Renew it every so many seconds."""
        self._kept.keep((lease, reader), every, now)
        self._due = min(self._due, now + every)

    def drop(self, lease: str, reader: str, now: float) -> None:
        """Renew it no longer, and close it. An `Open` of it that is not answered is
        not asked again: it would open what is closed. Who has never answered is told
        when he does, and nothing before: he may be anybody."""
        self._kept.drop((lease, reader))
        number = self._opens.get((lease, reader))
        if number is not None:
            self._end(self._forget(number).ticket, "the lease was dropped")
        if self.is_known:
            self.ask(None, wire.Close(lease=lease, reader=reader), CLOSE_S, now)
        elif len(self._untold) < MAX_UNTOLD:
            self._untold.append((lease, reader))

    def drop_all(self, now: float) -> None:
        """Close every lease that is kept."""
        for lease, reader in self._kept:
            self.drop(lease, reader, now)

    def met(self, *, is_ours: bool) -> None:
        """The peer speaks the protocol, and may have said that it is one of ours. If
        not, it gets one hello: it may be vLLM's, whose log says then who asked."""
        self._is_ours = is_ours

    # -- what is sent ------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Do what is due: end questions whose time is over, bring forward what has to
        be sent again, renew leases."""
        if now < self._due:
            return
        if self.is_known:
            untold, self._untold = self._untold, []
            for lease, reader in untold:
                self.drop(lease, reader, now)
        for number, asked in list(self._asked.items()):
            if asked.deadline <= now:
                self._expire(number)
            elif asked.tags and asked.again <= now:
                self._fresh.append(number)
                asked.again = asked.deadline
        for renewal, every in self._kept.renewals(now):
            self.ask(None, renewal, every, now)
        times = [asked.deadline for asked in self._asked.values()]
        times += [asked.again for asked in self._asked.values() if asked.tags]
        self._due = min(times, default=float("inf"))
        self._due = min(self._due, self._kept.next_time())

    def next_time(self, now: float) -> float:
        """When there will be something to do, beside sending what could be sent now;
        infinity for never."""
        if self._fresh and not self._nonce and self._hello_at > now:
            return min(self._due, self._hello_at)
        return self._due

    def has_something_to_send(self, now: float) -> bool:
        """Whether `messages` would yield."""
        return bool(self._fresh) and (bool(self._nonce) or now >= self._hello_at)

    def messages(self, now: float) -> Iterator[bytes]:
        """What to send now, in this order; each is taken to be sent."""
        if not self._nonce:
            if not self.has_something_to_send(now):
                return
            if self._has_no_answer():
                self.fail(stock.silent(self._address), final=True)
                return
            self._hello_at = now + RESEND_S
            yield frames.hello()
            return
        while self._fresh:
            number = self._fresh.popleft()
            if asked := self._asked.get(number):
                yield self._signed(number, asked, now)

    def _has_no_answer(self) -> bool:
        """A stranger got a hello, and said nothing."""
        return not self._is_ours and self._hello_at > float("-inf")

    def _signed(self, number: int, asked: _Asked, now: float) -> bytes:
        body = wire.encode(asked.question)
        header = Header(self._nonce, self._client, next(self._sequence))
        tag = self._signer.question_tag(header, body)
        asked.tags[header.sequence] = tag
        asked.tries += 1
        self._by_sequence[header.sequence] = number
        # a renewal is not repeated: the next one names what is wanted then
        once = asked.tries >= MAX_TRIES or isinstance(asked.question, wire.Renew)
        wait = min(RESEND_S, asked.timeout / 3)
        asked.again = asked.deadline if once else now + wait
        self._due = min(self._due, asked.again)
        return frames.asked(header, tag, body)

    # -- what arrives ------------------------------------------------------------------

    def received(self, parts: list[bytes]) -> None:
        """Frames from the peer.

        Raises:
            IntegrityError: they mean nothing here and have changed nothing.
        """
        match frames.from_server(parts):
            case frames.Welcome() as welcome:
                self._welcomed(welcome)
            case frames.Answered(sequence, tag, body):
                self._answered(sequence, tag, body)
            case frames.StockAnswer(vllm):
                self.fail(stock.answered_us(vllm, self._address), final=True)

    def _welcomed(self, welcome: frames.Welcome) -> None:
        if welcome.nonce == self._nonce:
            return  # said once for each question that a restart has met
        self.is_silent = False
        if welcome.protocol != frames.PROTOCOL:
            self.fail(
                f"{self._address} runs kvplugin {welcome.version} (protocol "
                f"{welcome.protocol}), this engine {VERSION} (protocol "
                f"{frames.PROTOCOL}): install one version everywhere",
                final=True,
            )
        elif welcome.signed != self._signer.has_secret:
            has, lacks = self._address, "this engine"
            if self._signer.has_secret:
                has, lacks = lacks, has
            self.fail(
                f"{has} has a secret and {lacks} has none: {_SECRETS}",
                final=True,
            )
        else:
            self._nonce = welcome.nonce
            self._ask_all_again()

    def _answered(self, sequence: int, tag: bytes, body: bytes) -> None:
        number = self._by_sequence.get(sequence)
        asked = None if number is None else self._asked.get(number)
        if number is None or asked is None:
            return  # late, or the second answer to a question asked twice
        self.is_silent = False
        genuine = same(tag, self._signer.answer_tag(asked.tags[sequence], body))
        self._forget(number)
        if not genuine:
            self._end(
                asked.ticket,
                f"{self._address} does not answer with this engine's secret: "
                f"{_SECRETS}",
                final=True,
            )
            return
        self.is_known = True
        if self._untold:
            self._due = float("-inf")
        try:
            answer = wire.decode_answer(body)
        except IntegrityError as error:
            self._end(asked.ticket, f"{self._address} answered with {error}")
            return
        if not isinstance(answer, _ANSWERS[type(asked.question)] | wire.Refused):
            kind = type(answer).__name__
            self._end(asked.ticket, f"{self._address} answered with a {kind}")
        elif asked.ticket is not None:
            self._reply(Reply(asked.ticket, answer))
        elif isinstance(answer, wire.Renewed):
            self._kept.renewed(answer)

    # -- what ends ---------------------------------------------------------------------

    def _expire(self, number: int) -> None:
        asked = self._forget(number)
        self.is_silent = True
        why = f"{self._address} has not answered within {asked.timeout:g} s"
        if self.is_held:
            why = f"the name of {self._address} waits to be looked up after others"
        self._end(asked.ticket, why, local=self.is_held)

    def interrupted(self) -> None:
        """The connection is lost, and with it what was on its way. On the next one,
        where another may listen, everything is asked again."""
        if not self._nonce and self._has_no_answer():
            self.fail(stock.silent(self._address), final=True)
        self._nonce = b""
        self._hello_at = float("-inf")
        self._ask_all_again()

    def _ask_all_again(self) -> None:
        self._by_sequence.clear()
        self._fresh.clear()
        for number, asked in list(self._asked.items()):
            if asked.tries >= MAX_TRIES:
                self._forget(number)
                why = f"{self._address} takes questions and does not answer them"
                self._end(asked.ticket, why)
                continue
            asked.tags.clear()
            self._fresh.append(number)

    def fail(self, why: str, *, final: bool = False, local: bool = False) -> None:
        """End every question, and begin anew with the next one. Who is none of ours
        holds no leases of ours."""
        self._nonce = b""
        self._hello_at = float("-inf")
        ended, self._asked = list(self._asked.values()), {}
        self._fresh.clear()
        self._by_sequence.clear()
        self._opens.clear()
        if final:
            self._kept = KeptLeases()
        for asked in ended:
            self._end(asked.ticket, why, final=final, local=local)

    def _forget(self, number: int) -> _Asked:
        asked = self._asked.pop(number)
        for sequence in asked.tags:
            self._by_sequence.pop(sequence, None)
        match asked.question:
            case wire.Open(lease=lease, reader=reader):
                self._opens.pop((lease, reader), None)
        return asked

    def _end(
        self, ticket: int | None, why: str, *, final: bool = False, local: bool = False
    ) -> None:
        if ticket is not None:
            self._reply(Reply(ticket, None, why, final, local))
