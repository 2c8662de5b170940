"""A side channel without sockets: questions arrive when a test says so, or never."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvplugin.connectors.nixl.channel import Answers, Channel, Reply, Server
from kvplugin.connectors.nixl.wire import (
    Answer,
    Close,
    Describe,
    Open,
    Question,
    Renew,
    Status,
)

TIMEOUT, LEASE, READ_TIMEOUT, DEAD_TTL = 5.0, 30.0, 60.0, 20.0


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


# -- the side channel ------------------------------------------------------------------


@dataclass
class Asked:
    ticket: int
    address: str
    question: Question
    deadline: float


class FakeServer(Server):
    def __init__(self, network: "Network", address: str) -> None:
        self._network = network
        self._address = address

    @property
    def address(self) -> str:
        return self._address

    def close(self) -> None:
        self._network.servers.pop(self._address, None)


class Network:
    """Who answers at which address, and how."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.servers: dict[str, Answers] = {}
        self.silent: set[str] = set()
        """Addresses that do not answer."""
        self.holds = False
        """Questions wait for a test to deliver them."""
        self.script: Callable[[str, Question], Answer | Reply | None] | None = None
        """Answers instead of a server; None: ask that one."""
        self.memories: dict[str, Any] = {}
        """Of engines that live, by peer id."""

    def answer(self, address: str, question: Question) -> Answer | Reply | None:
        """None if there is none."""
        if self.script is not None:
            answer = self.script(address, question)
            if answer is not None:
                return answer
        server = self.servers.get(address)
        if server is None or address in self.silent:
            return None
        if isinstance(question, Describe):
            return server.describe()
        if isinstance(question, Open):
            return server.open(question)
        if isinstance(question, Renew):
            return server.renew(question)
        if isinstance(question, Close):
            return server.close(question)
        assert isinstance(question, Status)
        return server.status()


class FakeChannel(Channel):
    """One engine's."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.asked: list[Asked] = []
        self.history: list[Asked] = []
        self.replies: list[Reply] = []
        self.kept: dict[tuple[str, str, str], float] = {}
        self.closes: list[tuple[str, str, str]] = []
        """That have not arrived."""
        self.dropped: list[tuple[str, str, str]] = []
        self.is_closed = False
        self._tickets = itertools.count(1)

    def ask(self, address: str, question: Question, timeout: float) -> int:
        assert not self.is_closed
        assert timeout > 0
        deadline = self.network.clock() + timeout
        asked = Asked(next(self._tickets), address, question, deadline)
        self.asked.append(asked)
        self.history.append(asked)
        if not self.network.holds:
            self.deliver(asked)
        return asked.ticket

    def deliver(self, asked: Asked) -> None:
        """Unless it is lost, its answer arrives now."""
        answer = self.network.answer(asked.address, asked.question)
        if answer is None:
            return
        self.asked.remove(asked)
        if isinstance(answer, Reply):
            self.replies.append(answer._replace(ticket=asked.ticket))
        else:
            self.replies.append(Reply(asked.ticket, answer))

    def take(self, wait: float = 0.0) -> list[Reply]:
        now = self.network.clock()
        late = [asked for asked in self.asked if asked.deadline <= now]
        for asked in late:
            self.asked.remove(asked)
            self.replies.append(Reply(asked.ticket, None, "it does not answer"))
        replies, self.replies = self.replies, []
        return replies

    def keep(self, address: str, lease: str, reader: str, every: float) -> None:
        assert every > 0
        key = address, lease, reader
        assert key not in self.kept, "kept twice"
        assert key not in self.dropped, "kept after it was dropped"
        self.kept[key] = every

    def drop(self, address: str, lease: str, reader: str) -> None:
        key = address, lease, reader
        assert key not in self.dropped, "dropped twice"
        self.dropped.append(key)
        self.kept.pop(key, None)
        self.closes.append(key)
        if not self.network.holds:
            self.send_closes()

    def send_closes(self) -> None:
        """Those that can arrive do."""
        for address, lease, reader in list(self.closes):
            if self.network.answer(address, Close(lease=lease, reader=reader)):
                self.closes.remove((address, lease, reader))

    def renew(self) -> None:
        """What is kept is renewed, as far as somebody answers."""
        for address, lease, reader in list(self.kept):
            self.network.answer(address, Renew(leases=[(lease, reader)]))

    def close(self) -> None:
        self.is_closed = True
        self.send_closes()
        self.kept.clear()
