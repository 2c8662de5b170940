"""Seeded sessions: who sends which request when, and which blocks it shares."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, count
from math import log
from random import Random
from typing import Final

TOKENS_PER_S: Final = 50.0
"""Speed at which answers come."""

MOST_TOKENS: Final = 131072
"""A session ends when its history is longer."""


@dataclass(frozen=True)
class Spread:
    """A log-normal quantity: its median, and the sigma of its logarithm."""

    median: float
    sigma: float

    def draw(self, random: Random) -> float:
        """A value above 0."""
        return random.lognormvariate(log(self.median), self.sigma)

    def tokens(self, random: Random) -> int:
        """A number of tokens, at least 1."""
        return max(1, round(self.draw(random)))


@dataclass(frozen=True)
class Shape:
    """What sessions of a kind look like, in tokens and seconds."""

    prompts: int
    """Shared beginnings (system prompts, tool descriptions)."""
    zipf: float
    """Exponent of their popularity."""
    prompt_tokens: Spread
    sessions_per_s: float
    goes_on: float
    """Chance that an answer is followed by one more request."""
    pause_s: Spread
    """Between an answer and the next request."""
    message_tokens: Spread
    answer_tokens: Spread
    scans: float = 0.0
    """Share of sessions that are one request, and share nothing."""
    scan_tokens: Spread = Spread(1, 0)
    branches: float = 0.0
    """Chance that an answer is followed by two requests side by side."""


@dataclass
class Session:
    """A conversation so far, as the blocks that its tokens fill."""

    name: str
    blocks: list[int]
    """Full blocks; what follows them is the session's own."""
    tokens: int
    turn: int = 0
    is_scan: bool = False


class Source:
    """Sessions of one shape.

    Args:
        name: begins the names of its sessions.
        shape: what they look like.
        random: where chance comes from.
        block_size: tokens of a block.
        new_block: an id that no other block has.
    """

    def __init__(
        self,
        name: str,
        shape: Shape,
        random: Random,
        block_size: int,
        new_block: Callable[[], int],
    ) -> None:
        self._name = name
        self._shape = shape
        self._random = random
        self._block_size = block_size
        self._new_block = new_block
        self._numbers = count()
        self._prompts = [
            self._grown(self._session(), shape.prompt_tokens)
            for _ in range(shape.prompts)
        ]
        ranks = range(1, shape.prompts + 1)
        self._weights = [*accumulate(rank**-shape.zipf for rank in ranks)]

    def arrivals(self) -> Iterator[tuple[float, Session]]:
        """(time, session with its first message) for ever, in order."""
        now = 0.0
        while True:
            now += self._random.expovariate(self._shape.sessions_per_s)
            yield now, self._first()

    def answer(self, session: Session) -> int:
        """Let the model answer; the tokens of the answer."""
        before = session.tokens
        self._grown(session, self._shape.answer_tokens)
        return session.tokens - before

    def followers(
        self, session: Session, answered: float
    ) -> Iterator[tuple[float, Session]]:
        """(time, session with its next message) of what follows an answer."""
        shape, random = self._shape, self._random
        over = session.is_scan or session.tokens > MOST_TOKENS
        if over or random.random() >= shape.goes_on:
            return
        session.turn += 1
        following = [session]
        if random.random() < shape.branches:
            following.append(self._session(session))
        for each in following:
            self._grown(each, shape.message_tokens)
            yield answered + shape.pause_s.draw(random), each

    def _first(self) -> Session:
        shape, random = self._shape, self._random
        if random.random() < shape.scans:
            scan = self._grown(self._session(), shape.scan_tokens)
            scan.is_scan = True
            return scan
        [prompt] = random.choices(self._prompts, cum_weights=self._weights)
        return self._grown(self._session(prompt), shape.message_tokens)

    def _session(self, past: Session | None = None) -> Session:
        """A new session, with the past of another."""
        name = f"{self._name}-{next(self._numbers)}"
        if past is None:
            return Session(name, [], 0)
        return Session(name, list(past.blocks), past.tokens, past.turn)

    def _grown(self, session: Session, by: Spread) -> Session:
        """The session with tokens of its own behind it."""
        session.tokens += by.tokens(self._random)
        missing = session.tokens // self._block_size - len(session.blocks)
        session.blocks += [self._new_block() for _ in range(missing)]
        return session
