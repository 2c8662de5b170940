"""From a request's arrival to its grant: a peer describes itself, and opens a lease."""

from collections.abc import Callable
from typing import Final, Protocol

from kvplugin.connectors.nixl.boundary import checked
from kvplugin.connectors.nixl.channel import Channel, Reply
from kvplugin.connectors.nixl.peers import Peer, Peers
from kvplugin.connectors.nixl.prompt import agreed_tokens
from kvplugin.connectors.nixl.questions import Questions
from kvplugin.connectors.nixl.requests import Phase, Pull
from kvplugin.connectors.nixl.wire import Gone, Granted, Open, Refused
from kvplugin.errors import KVPluginError

_ROUNDS: Final = 4
"""Questions and answers in a row that one call takes in."""
_RENEWALS: Final = 6
"""Times that a lease is renewed while it lasts."""


class Miss(Protocol):
    """What becomes of a request that reads nothing."""

    def __call__(self, pull: Pull, why: str, *, tell: bool = True) -> None:
        """Without `tell` there is nobody to give the lease back to."""


class Openings:
    """Requests that wait for their grant.

    Args:
        peers: the other engines.
        questions: to them.
        channel: that keeps leases.
        timeout: seconds in which a peer must answer.
        miss: called for each that gets none.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        peers: Peers,
        questions: Questions,
        channel: Channel,
        timeout: float,
        miss: Miss,
        clock: Callable[[], float],
    ) -> None:
        self._peers = peers
        self._questions = questions
        self._channel = channel
        self._timeout = timeout
        self._miss = miss
        self._clock = clock
        self._opening: dict[Pull, None] = {}

    def begin(self, pull: Pull) -> None:
        """A request has come."""
        self._opening[pull] = None
        self.advance(pull)
        self.hear()

    def end(self, pull: Pull) -> None:
        """It waits no more."""
        self._opening.pop(pull, None)
        if pull.forget_question is not None:
            pull.forget_question()
            pull.forget_question = None

    def hear(self) -> None:
        """Take in what other engines have answered."""
        for _ in range(_ROUNDS):
            if not self._hear(0.0):
                return

    def wait_for(self, pull: Pull, seconds: float) -> None:
        """Give its peer so long to answer, at most."""
        end = self._clock() + seconds
        while pull.waits and seconds > 0 and self._hear(seconds):
            seconds = end - self._clock()

    def _hear(self, wait: float) -> bool:
        if not (self._peers.take_in() or self._questions.hear(wait)):
            return False
        for pull in list(self._opening):
            self.advance(pull)
        return True

    def advance(self, pull: Pull) -> None:
        """Ask for the lease as soon as its peer is ready."""
        if not pull.waits or pull.forget_question is not None:
            return
        source = pull.source
        outlook = self._peers.look(
            source.address, source.engine_id, pull.came, pull.doubted
        )
        if outlook.reason:
            self._miss(pull, outlook.reason, tell=outlook.answers)
        elif outlook.peer is None:
            return
        elif pull.peer is not None and pull.peer.peer_id == outlook.peer.peer_id:
            self._miss(pull, "its lease is over", tell=False)
        else:
            self._open(pull, outlook.peer)

    def expire(self, pull: Pull) -> None:
        """The request has waited long enough."""
        if pull.forget_question is not None and pull.peer is not None:
            self._is_silent(pull, pull.peer, "it does not answer")
        self._miss(pull, "no answer in time (handshake_timeout_s)")

    def _is_silent(self, pull: Pull, peer: Peer, why: str) -> None:
        """The peer has not answered: it is dead, unless it had little time to, as its
        description took most of it."""
        if pull.patience >= self._timeout / 2:
            self._peers.died(peer, why)

    def _open(self, pull: Pull, peer: Peer) -> None:
        pull.peer = peer
        pull.patience = max(pull.deadline - self._clock(), 0.001)
        source = pull.source
        pull.forget_question = self._questions.ask(
            source.address,
            Open(peer_id=peer.peer_id, lease=source.lease, reader=pull.reader),
            pull.patience,
            lambda reply: self._opened(pull, peer, reply),
        )

    def _opened(self, pull: Pull, peer: Peer, reply: Reply) -> None:
        pull.forget_question = None
        answer = reply.answer
        if isinstance(answer, Granted):
            self._granted(pull, peer, answer)
        elif isinstance(answer, Gone):
            # Over, or the peer was restarted: then another one describes itself.
            pull.doubted = self._clock()
            self.advance(pull)
        elif answer is None:
            if not reply.final and not reply.local:
                self._is_silent(pull, peer, reply.error)
            self._miss(pull, reply.error)
        else:
            name = type(answer).__name__
            why = answer.reason if isinstance(answer, Refused) else f"answer: {name}"
            self._miss(pull, why)

    def _granted(self, pull: Pull, peer: Peer, granted: Granted) -> None:
        try:
            grant = checked(granted, peer.block_sizes, peer.descriptor.num_blocks)
            pull.agreed = agreed_tokens(pull.request, granted)
        except (KVPluginError, OverflowError) as error:
            self._miss(pull, str(error))
            return
        if not pull.agreed:
            self._miss(pull, "the lease is about other tokens")
            return
        pull.grant = grant
        pull.phase = Phase.GRANTED
        self.end(pull)
        source, every = pull.source, grant.seconds / _RENEWALS
        self._channel.keep(source.address, source.lease, pull.reader, every)
