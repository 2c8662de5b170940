"""What a connector answers its engine's scheduler, and answers that cannot be.

Nobody waits or fails for a wrong answer: it counts as the one that costs least, and is
logged once a kind.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from kvplugin.contract import (
    MISS,
    Lookup,
    MeetsPeers,
    PeerRequestView,
    RequestView,
    SchedulerHalf,
)

logger: Final = logging.getLogger("vllm.kvplugin.scheduler")


class ConnectorAnswers:
    """Asks a connector's scheduler half.

    Args:
        connector: the half; without one everything is a miss. What it has no method
            for (`MeetsPeers`), it has nothing to say about.
    """

    def __init__(self, connector: SchedulerHalf | None) -> None:
        self._connector = connector
        half: object = connector
        self._peers = half if isinstance(half, MeetsPeers) else None
        self._blamed: set[str] = set()

    def lookup(self, request: RequestView, hit: int) -> Lookup:
        """Tokens that it can bring beyond the local hit; a miss for a wrong answer."""
        half = self._connector
        if half is None:
            return MISS
        answer, wrong = _answer(lambda: half.lookup(request, hit))
        wrong = wrong or _wrong_lookup(answer, request.num_tokens - hit)
        return MISS if self._blames("lookup", answer, wrong, "a miss") else answer

    def arrived(self, request: PeerRequestView) -> int:
        """Tokens at the end of a new request's prompt to leave away; none for a wrong
        answer."""
        half = self._peers
        if half is None:
            return 0
        answer, wrong = _answer(lambda: half.arrived(request))
        if not wrong and not (type(answer) is int and answer >= 0):
            wrong = "no number of tokens"
        elif not wrong and answer >= request.num_prompt_tokens:
            wrong = "nothing is left of the prompt"
        return 0 if self._blames("arrived", answer, wrong, "0") else answer

    def handover(
        self,
        request: PeerRequestView,
        block_ids: tuple[Sequence[int], ...],
        num_computed_tokens: int,
    ) -> dict[str, Any] | None:
        """What the client of an ended request is told; nothing for a wrong answer."""
        half = self._peers
        if half is None:
            return None
        answer, wrong = _answer(
            lambda: half.handover(request, block_ids, num_computed_tokens)
        )
        if not wrong and answer is not None and not _is_mapping(answer):
            wrong = f"{type(answer).__name__} is no mapping from strings"
        if self._blames("handover", answer, wrong, "None") or answer is None:
            return None
        return dict(answer)

    def _blames(self, method: str, answer: object, wrong: str, instead: str) -> bool:
        """Whether something is wrong with an answer; it is logged for the first time
        only."""
        if wrong and (kind := f"{method}: {wrong}") not in self._blamed:
            self._blamed.add(kind)
            name = type(self._connector).__name__
            logger.error("%s.%s: %r; taken for %s", name, kind, answer, instead)
        return bool(wrong)


def _answer(ask: Callable[[], object]) -> tuple[Any, str]:
    """An answer, and what is wrong if it is an error."""
    try:
        return ask(), ""
    except Exception as error:
        return error, f"{type(error).__name__} is no answer"


def _is_mapping(answer: object) -> bool:
    return isinstance(answer, Mapping) and all(type(key) is str for key in answer)


def _wrong_lookup(answer: object, most: int) -> str:
    """Empty if nothing is."""
    if not isinstance(answer, Lookup) or type(answer.ready) is not bool:
        return f"{type(answer).__name__} is no answer"
    if not answer.ready:
        return ""
    if type(answer.tokens) is not int or answer.tokens < 0:
        return "no number of tokens"
    return "more tokens than the request has" if answer.tokens > most else ""
