"""How long recomputing tokens would take, learnt from the engine's own steps."""

from collections.abc import Callable
from itertools import takewhile
from typing import Final

MIN_TOKENS: Final = 64
"""Steps with fewer tokens are decode steps: their time says nothing of prefill."""

DECAY: Final = 0.9
"""Weight of the past at each new observation: about the last ten prefill steps."""


class RecomputeRate:
    """Seconds of prefill per token, as a decaying average over prefill steps.

    An estimate: prefill grows faster than linearly with the prompt, and a step's
    time includes sampling.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started: dict[int, tuple[float, int]] = {}
        self._seconds = 0.0
        self._tokens = 0.0

    def started(self, step: int, tokens: int) -> bool:
        """A step that computes `tokens` tokens goes to the workers.

        Returns:
            Whether its end is worth hearing of.
        """
        if tokens < MIN_TOKENS:
            return False
        self._started[step] = (self._clock(), tokens)
        return True

    def ended(self, step: int) -> None:
        """A worker reports the step; only the first report counts. Earlier steps of
        which none has come by then are forgotten."""
        start, tokens = self._started.pop(step, (0.0, 0))
        for missed in list(takewhile(lambda other: other < step, self._started)):
            del self._started[missed]
        if tokens:
            self._seconds = DECAY * self._seconds + self._clock() - start
            self._tokens = DECAY * self._tokens + tokens

    def seconds_for(self, tokens: int) -> float:
        """Estimated seconds to compute `tokens` tokens; 0 before any prefill."""
        return tokens * self._seconds / self._tokens if self._tokens else 0.0
