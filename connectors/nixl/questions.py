"""Questions under way on the side channel, and who waits for their replies."""

from collections.abc import Callable
from typing import TypeAlias

from kvplugin.connectors.nixl.channel import Channel, Reply
from kvplugin.connectors.nixl.wire import Question

Then: TypeAlias = Callable[[Reply], None]


class Questions:
    """Hands each reply to who asked.

    Args:
        channel: that carries them.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._asked: dict[int, Then] = {}

    def __len__(self) -> int:
        """Questions without a reply."""
        return len(self._asked)

    def ask(
        self, address: str, question: Question, timeout: float, then: Then
    ) -> Callable[[], None]:
        """Ask, and have `then` called with the reply by a later `hear`.

        Returns:
            What forgets the question.
        """
        ticket = self._channel.ask(address, question, timeout)
        self._asked[ticket] = then
        return lambda: self._forget(ticket)

    def _forget(self, ticket: int) -> None:
        self._asked.pop(ticket, None)

    def hear(self, wait: float = 0.0) -> bool:
        """Hand out the replies that have come. Those that nobody waits for any more, or
        that have come before, are for nobody.

        Args:
            wait: seconds to wait at most for the first.

        Returns:
            Whether there were any.
        """
        replies = self._channel.take(wait)
        for reply in replies:
            then = self._asked.pop(reply.ticket, None)
            if then is not None:
                then(reply)
        return bool(replies)
