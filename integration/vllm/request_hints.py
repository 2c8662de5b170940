"""A client's hints about a request, put where eviction policies find them."""

import logging
from typing import Any, Final

from msgspec import structs

from kvplugin.hints import RequestHints, hints_of
from kvplugin.request import RequestError

logger = logging.getLogger("vllm.kvplugin.hints")

_MOST_WARNINGS: Final = 16
"""Clients write what is logged: it must not fill the log."""


class HintReader:
    """Reads hints from `SamplingParams.extra_args` and `kv_transfer_params`, and the
    session from the request's `session_id` (vLLM 0.32) where they name none.

    Hints that make no sense are left out: a client's mistake harms nobody else. Each
    kind of mistake is logged once.
    """

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def read(self, request: Any, now: float) -> None:
        """Set the request's `block_context`, if there are hints.

        Args:
            request: vLLM's.
            now: seconds, of the clock of `EvictionPolicy.step`.
        """
        parameters = request.sampling_params
        try:
            hints = hints_of(
                getattr(parameters, "extra_args", None), request.kv_transfer_params
            )
            hints = _in_session(hints, getattr(request, "session_id", None))
            if hints is not None:
                request.block_context = hints.context(now, request)
        except RequestError as error:
            self._warn(request.request_id, str(error))
        except Exception as error:  # whatever a client sends, the engine lives
            self._warn(request.request_id, f"{type(error).__name__}: {error}")

    def _warn(self, request_id: str, mistake: str) -> None:
        kind = mistake.partition(":")[0]
        if kind not in self._logged and len(self._logged) < _MOST_WARNINGS:
            self._logged.add(kind)
            logger.warning(
                "hints of request %s are ignored, as those of others with this mistake "
                "will be: %.200s",
                request_id,
                mistake,
            )


def _in_session(hints: RequestHints | None, session: str | None) -> RequestHints | None:
    if not session or (hints is not None and hints.session is not None):
        return hints
    return structs.replace(hints or RequestHints(), session=session)
