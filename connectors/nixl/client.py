"""The side channel's asker: one thread, one connection a peer."""

import itertools
import logging
import math
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, TypeAlias

from kvplugin.connectors.nixl.address import out_of_reach, parse_address
from kvplugin.connectors.nixl.auth import Signer
from kvplugin.connectors.nixl.channel import Reply
from kvplugin.connectors.nixl.conversation import Conversation
from kvplugin.connectors.nixl.grumble import Grumble
from kvplugin.connectors.nixl.link import Link
from kvplugin.connectors.nixl.names import Endpoint, Names
from kvplugin.connectors.nixl.wake import Wake
from kvplugin.connectors.nixl.wire import Question
from kvplugin.errors import CapacityError, ConfigError

logger = logging.getLogger("vllm.kvplugin.nixl")

MAX_PEERS: Final = 256
"""Connections at a time to peers that have answered, and as many to strangers: clients
make those up. Each takes the place of the one of its kind that has been idle for
longest; if none is idle, a new one is not asked."""
MAX_KNOWN: Final = 1024
"""Addresses that are remembered to have answered."""
IDLE_S: Final = 600.0
"""After which the connection to a peer that nobody asks is closed."""
MAX_WAITING: Final = 65_536
"""Calls that the thread has not yet seen."""
_LOOK_S: Final = 0.2
"""Between two looks at the clock while something is due: it may not be the system's."""
_CLOSE_S: Final = 5.0
"""How long `close` waits for the thread."""

_Command: TypeAlias = Callable[[], None]


class ChannelClient:
    """Implements `kvplugin.connectors.nixl.channel.Channel`.

    Args:
        secret: `kvplugin.connectors.nixl.auth.load_secret`.
        insecure: ask engines on other machines without a secret too.
        clock: monotonic seconds: every deadline is by it.
        max_peers: connections at a time, of each kind (`MAX_PEERS`).
    """

    def __init__(
        self,
        *,
        secret: bytes,
        insecure: bool = False,
        clock: Callable[[], float] = time.monotonic,
        max_peers: int = MAX_PEERS,
    ) -> None:
        self._signer = Signer(secret)
        self._only_this_machine = not (secret or insecure)
        self._clock = clock
        self._max_peers = max_peers
        self._tickets = itertools.count(1)
        self._lock = threading.Condition()
        self._commands: deque[_Command] = deque()
        self._replies: list[Reply] = []
        self._links: dict[str, Link] = {}
        self._known: dict[str, None] = {}
        """Addresses that have answered, the last ones last."""
        # names that clients make up keep none waiting that is known
        self._names = {known: Names(self._found) for known in (False, True)}
        self._garbage = Grumble("a peer sent what means nothing", clock)
        self._trouble = Grumble("trouble on the side channel", clock)
        self._wake = Wake()
        self._closing = False
        self._thread = threading.Thread(
            target=self._run, name="kvplugin-nixl-client", daemon=True
        )
        self._thread.start()

    # -- from the engine's thread ------------------------------------------------------

    def ask(self, address: str, question: Question, timeout: float) -> int:
        """See `kvplugin.connectors.nixl.channel.Channel.ask`."""
        ticket = next(self._tickets)
        called = self._clock()
        if not self._do(lambda: self._ask(ticket, address, question, timeout, called)):
            why = "the side channel is closed or overrun"
            self._reply(Reply(ticket, None, why, local=True))
        return ticket

    def take(self, wait: float = 0.0) -> list[Reply]:
        """See `kvplugin.connectors.nixl.channel.Channel.take`."""
        if not self._replies and wait <= 0:
            return []
        with self._lock:
            if not self._replies:
                self._lock.wait(wait)
            taken, self._replies = self._replies, []
        return taken

    def keep(self, address: str, lease: str, reader: str, every: float) -> None:
        """See `kvplugin.connectors.nixl.channel.Channel.keep`."""
        called = self._clock()
        self._do(lambda: self._keep(address, lease, reader, every, called))

    def drop(self, address: str, lease: str, reader: str) -> None:
        """See `kvplugin.connectors.nixl.channel.Channel.drop`."""
        self._do(lambda: self._drop(address, lease, reader))

    def close(self) -> None:
        """See `kvplugin.connectors.nixl.channel.Channel.close`; kept leases are closed
        too."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._wake.set()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            logger.warning("the side channel's client does not end")
            return
        self._wake.close()

    def _do(self, command: _Command) -> bool:
        """Have the thread do it."""
        with self._lock:
            if self._closing or len(self._commands) >= MAX_WAITING:
                return False
            self._commands.append(command)
            if len(self._commands) == 1:
                self._wake.set()
        return True

    def _reply(self, reply: Reply) -> None:
        with self._lock:
            self._replies.append(reply)
            self._lock.notify()

    # -- on the thread -----------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                try:
                    self._turn()
                except Exception as error:  # whatever it was, the others go on
                    self._trouble(f"{type(error).__name__}: {error}")
        finally:
            self._end()

    def _turn(self) -> None:
        events = self._wait()
        self._wake.clear()
        self._obey()
        now = self._clock()
        for address, link in list(self._links.items()):
            link.conversation.is_held = self._waits(address)
            try:
                link.work(events.get(address, 0), now)
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
                # what a peer can do is told apart by `Link`: this is no file left, say
                self._lose(address, why, local=isinstance(error, OSError))
            if link.conversation.is_known:
                self._knows(address)
        self._tidy(now)

    def _wait(self) -> dict[str, int]:
        """Sleep until something arrives, can be sent, is due, or is asked of us.

        Returns:
            What the poller says, by the address of the peer.
        """
        now = self._clock()
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        watched: dict[int, str] = {}
        due = math.inf
        for address, link in self._links.items():
            if (descriptor := link.register(poller)) is not None:
                watched[descriptor] = address
            due = min(due, link.next_time(now) - now)
        if due < math.inf:
            found = poller.poll(math.ceil(1000 * max(0.0, min(due, _LOOK_S))))
        else:
            found = poller.poll(1000 * IDLE_S if self._links else None)
        return {watched[fd]: events for fd, events in found if fd in watched}

    def _obey(self) -> None:
        with self._lock:
            commands, self._commands = self._commands, deque()
        for command in commands:
            try:
                command()
            except Exception as error:
                self._trouble(f"{type(error).__name__}: {error}")

    def _ask(
        self,
        ticket: int,
        address: str,
        question: Question,
        timeout: float,
        called: float,
    ) -> None:
        try:
            link = self._link(address)
        except ConfigError as error:
            self._reply(Reply(ticket, None, str(error)))
            return
        except CapacityError as error:
            self._reply(Reply(ticket, None, str(error), local=True))
            return
        link.conversation.ask(ticket, question, timeout, called)

    def _keep(
        self, address: str, lease: str, reader: str, every: float, called: float
    ) -> None:
        self._link(address).conversation.keep(lease, reader, every, called)

    def _drop(self, address: str, lease: str, reader: str) -> None:
        if address in self._links or address in self._known:
            self._link(address).conversation.drop(lease, reader, self._clock())

    def _link(self, address: str) -> Link:
        """The link to an address, made if there is none.

        Raises:
            ConfigError: that is no address.
            CapacityError: as many strangers, or others, as there may be are busy.
        """
        link = self._links.get(address)
        if link is None:
            parsed = parse_address(address)
            self._make_room(is_known=address in self._known)
            conversation = Conversation(address, self._signer, self._reply)
            conversation.is_known = address in self._known
            link = Link(conversation, address, self._garbage)
            self._links[address] = link
            self._names[conversation.is_known].look_up(address, parsed)
        link.used_at = self._clock()
        return link

    def _make_room(self, *, is_known: bool) -> None:
        """For one more of its kind; no stranger takes the place of one that is
        known."""
        self._thin_out(is_known=True, most=self._max_peers - is_known)
        self._thin_out(is_known=False, most=self._max_peers - (not is_known))
        alike = [
            link
            for link in self._links.values()
            if link.conversation.is_known == is_known
        ]
        full = len(self._links) >= 2 * self._max_peers  # strangers become known
        if full or len(alike) >= self._max_peers:
            raise CapacityError(f"{self._max_peers} peers are busy: no more at a time")

    def _thin_out(self, *, is_known: bool, most: int) -> None:
        """Close idle links of a kind, the oldest first, until there are so many."""
        alike = {
            address: link
            for address, link in self._links.items()
            if link.conversation.is_known == is_known
        }
        idle = [(x.used_at, a) for a, x in alike.items() if x.conversation.is_idle]
        for _, address in sorted(idle)[: max(0, len(alike) - most)]:
            self._remove(address).close()

    def _remove(self, address: str) -> Link:
        for names in self._names.values():
            names.forget(address)
        return self._links.pop(address)

    def _waits(self, address: str) -> bool:
        return any(names.waits(address) for names in self._names.values())

    def _knows(self, address: str) -> None:
        """It has answered."""
        self._known.pop(address, None)
        self._known[address] = None
        if len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]

    def _found(self, address: str, result: Endpoint | str) -> None:
        """From a thread of `Names`."""
        self._do(lambda: self._reach(address, result))

    def _reach(self, address: str, result: Endpoint | str) -> None:
        link = self._links.get(address)
        if link is None:
            return
        if isinstance(result, str):
            self._lose(address, result)
            return
        # here, where it is what the socket gets: a name is another's by the next time
        why = out_of_reach(result.address[0], only_this_machine=self._only_this_machine)
        if why:
            self._lose(address, why, final=True)
        else:
            link.reach(result)

    def _lose(
        self, address: str, why: str, *, final: bool = False, local: bool = False
    ) -> None:
        """Give a peer up; the next question begins anew."""
        link = self._remove(address)
        link.conversation.fail(why, final=final, local=local)
        link.close()

    def _tidy(self, now: float) -> None:
        """Close connections to peers that nobody asks, at once where they are dead."""
        for address, link in list(self._links.items()):
            conversation = link.conversation
            patience = 0.0 if conversation.is_silent else IDLE_S
            if conversation.is_idle and now - link.used_at >= patience:
                self._remove(address).close()

    def _end(self) -> None:
        """Let the last closes go out, and everything else end."""
        try:
            self._obey()
            now = self._clock()
            for link in self._links.values():
                link.conversation.drop_all(now)
                link.work(0, now)
        except Exception as error:
            self._trouble(f"{type(error).__name__}: {error}")
        for link in self._links.values():
            link.conversation.fail("the side channel is closed", local=True)
            link.close()
