"""The seams of the side channel: who asks, and who answers.

Addresses are ``host:port``, an IPv6 host in brackets.
"""

from typing import NamedTuple, Protocol

from kvplugin.connectors.nixl.wire import (
    Answer,
    Close,
    Closed,
    Description,
    Gone,
    Granted,
    Health,
    Open,
    Question,
    Renew,
    Renewed,
)


class Reply(NamedTuple):
    """How a question ended."""

    ticket: int
    answer: Answer | None
    """Of the kind that the question asks for, or `Refused`. None: there is no answer,
    and `error` says why."""
    error: str = ""
    final: bool = False
    """Asking again is in vain: another protocol, another secret."""
    local: bool = False
    """A limit of this engine is why; the peer may be as well as ever."""


class Channel(Protocol):
    """Asks other engines, on a thread of its own; nothing here raises, and only `take`
    waits, if it is told to."""

    def ask(self, address: str, question: Question, timeout: float) -> int:
        """Ask; the ticket of the `Reply` that will come, after `timeout` seconds at
        the latest."""

    def take(self, wait: float = 0.0) -> list[Reply]:
        """Replies since the last call, each once; waits for one at most so many
        seconds."""

    def keep(self, address: str, lease: str, reader: str, every: float) -> None:
        """Renew a lease every so many seconds from now on, until `drop`."""

    def drop(self, address: str, lease: str, reader: str) -> None:
        """Renew it no longer and close it (kept or not); tried a few times, after
        which it ends by itself."""

    def close(self) -> None:
        """Closes go out first where that takes no time; then the thread ends."""


class Answers(Protocol):
    """What a server answers; asked on its thread, so locked where needed."""

    def describe(self) -> Description: ...
    def open(self, question: Open) -> Granted | Gone: ...
    def renew(self, question: Renew) -> Renewed: ...
    def close(self, question: Close) -> Closed: ...
    def status(self) -> Health: ...


class Server(Protocol):
    """Listens until it is closed."""

    @property
    def address(self) -> str:
        """Where others reach it."""

    def close(self) -> None: ...
