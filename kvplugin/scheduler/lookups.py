"""Lookups: what a connector can bring, and answers that cannot be."""

import logging
from typing import Final

from kvplugin.contract import MISS, Lookup, RequestView, SchedulerHalf

logger: Final = logging.getLogger("vllm.kvplugin.scheduler")


class Lookups:
    """Asks a connector. Whatever it cannot mean counts as a miss, so that no request
    waits for it, and is logged once a kind.

    Args:
        connector: its scheduler half; without one everything is a miss.
    """

    def __init__(self, connector: SchedulerHalf | None) -> None:
        self._connector = connector
        self._blamed: set[str] = set()

    def ask(self, request: RequestView, hit: int) -> Lookup:
        """Tokens that it can bring beyond the local hit."""
        if self._connector is None:
            return MISS
        try:
            answer: object = self._connector.lookup(request, hit)
        except Exception as error:
            answer = error
        wrong = _what_is_wrong(answer, request.num_tokens - hit)
        if isinstance(answer, Lookup) and not wrong:
            return answer
        if wrong not in self._blamed:
            self._blamed.add(wrong)
            name = type(self._connector).__name__
            logger.error("%s.lookup: %s: %r; taken for a miss", name, wrong, answer)
        return MISS


def _what_is_wrong(answer: object, most: int) -> str:
    """Empty if nothing is."""
    if not isinstance(answer, Lookup) or type(answer.ready) is not bool:
        return f"{type(answer).__name__} is no answer"
    if not answer.ready:
        return ""
    if type(answer.tokens) is not int or answer.tokens < 0:
        return "no number of tokens"
    return "more tokens than the request has" if answer.tokens > most else ""
