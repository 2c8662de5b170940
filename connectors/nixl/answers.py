"""What an engine answers to others on the side channel."""

from collections.abc import Callable

from kvplugin.connectors.nixl.leases import Leases
from kvplugin.connectors.nixl.wire import (
    Close,
    Closed,
    Description,
    Gone,
    Granted,
    Health,
    Open,
    Renew,
    Renewed,
)


class EngineAnswers:
    """Implements `kvplugin.connectors.nixl.channel.Answers`.

    Args:
        peer_id: of this very process: a reader that means an earlier one knows where
            that one's memory was.
        description: of this engine.
        leases: its leases.
        health: tells how it is; called on the server's thread.
    """

    def __init__(
        self,
        peer_id: str,
        description: Description,
        leases: Leases,
        health: Callable[[], Health],
    ) -> None:
        self._peer_id = peer_id
        self._description = description
        self._leases = leases
        self._health = health

    def describe(self) -> Description:
        """Always the same."""
        return self._description

    def open(self, question: Open) -> Granted | Gone:
        """Of this very process only."""
        if question.peer_id != self._peer_id:
            return Gone(
                reason=f"this is {self._peer_id}, not {question.peer_id}: it was "
                "restarted, or is elsewhere"
            )
        return self._leases.open(question)

    def renew(self, question: Renew) -> Renewed:
        return self._leases.renew(question)

    def close(self, question: Close) -> Closed:
        return self._leases.close(question)

    def status(self) -> Health:
        return self._health()
