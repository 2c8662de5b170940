"""Seeded traces: chats of many turns, agents that call tools, and both.

What they have of real traffic is what matters to a prefix cache: shared beginnings of
unequal popularity, conversations that grow and pause, long prompts that nobody asks
again, bursts of calls over deep prompts, and branches that share all but their ends.
The same arguments give the same trace, byte for byte.
"""

import heapq
from collections.abc import Iterator, Mapping
from itertools import count, islice
from pathlib import Path
from random import Random
from typing import Final

from kvplugin.errors import check_count, unknown_name
from kvplugin.replay.sessions import TOKENS_PER_S, Session, Shape, Source, Spread
from kvplugin.replay.trace import TraceEntry
from kvplugin.replay.write import write_entries

CHAT: Final = Shape(
    prompts=64,
    zipf=1.1,
    prompt_tokens=Spread(900, 0.7),
    sessions_per_s=0.5,
    goes_on=0.78,
    pause_s=Spread(35, 1.0),
    message_tokens=Spread(120, 1.0),
    answer_tokens=Spread(260, 0.7),
    scans=0.2,
    scan_tokens=Spread(6000, 0.8),
)
"""Chosen to look plausible; no policy was tuned on what comes out."""

TOOLS: Final = Shape(
    prompts=12,
    zipf=0.9,
    prompt_tokens=Spread(7000, 0.5),
    sessions_per_s=0.15,
    goes_on=0.9,
    pause_s=Spread(2.5, 0.8),
    message_tokens=Spread(350, 1.1),
    answer_tokens=Spread(70, 0.6),
    branches=0.08,
)
"""The same of agents: deep prompts, short pauses, branches."""

KINDS: Final[Mapping[str, Mapping[str, Shape]]] = {
    "chat": {"chat": CHAT},
    "tools": {"tools": TOOLS},
    "mix": {"chat": CHAT, "tools": TOOLS},
}
"""Kind of a trace -> name and shape of its sources."""

DEFAULT_BLOCK: Final = 64
"""Tokens of a block, small enough to be split for most engines and large enough for
traces of readable size."""


def generate(
    kind: str, requests: int, seed: int, block_size: int = DEFAULT_BLOCK
) -> Iterator[TraceEntry]:
    """Requests in the order of their arrival; ids name full blocks.

    Args:
        kind: one of `KINDS`.
        requests: how many.
        seed: of all chance.
        block_size: tokens that an id covers.

    Raises:
        ConfigError: there is no such kind, or a number is too small.
    """
    if kind not in KINDS:
        raise unknown_name("kind of trace", kind, KINDS, "kind")
    check_count("requests", requests, 1)
    check_count("seed", seed, 0)
    check_count("block_size", block_size, 1)
    return islice(_entries(KINDS[kind], seed, block_size), requests)


def write_generated(
    path: str | Path,
    kind: str,
    requests: int,
    seed: int,
    block_size: int = DEFAULT_BLOCK,
) -> None:
    """`generate` into a file of our own format.

    Raises:
        ConfigError: as `generate` does.
        OSError: the file cannot be written.
    """
    entries = generate(kind, requests, seed, block_size)
    write_entries(path, entries, block_size)


def _entries(
    shapes: Mapping[str, Shape], seed: int, block_size: int
) -> Iterator[TraceEntry]:
    """For ever."""
    random, ids, order = Random(seed), count(), count()  # noqa: S311  # no secrets
    due: list[tuple[float, int, Session, Source]] = []
    arrivals = {}
    for name, shape in shapes.items():
        source = Source(name, shape, random, block_size, lambda: next(ids))
        arrivals[source] = source.arrivals()
        now, session = next(arrivals[source])
        heapq.heappush(due, (now, next(order), session, source))
    while True:
        now, _, session, source = heapq.heappop(due)
        if session.turn == 0:
            later, new = next(arrivals[source])
            heapq.heappush(due, (later, next(order), new, source))
        prompt, turn = session.tokens, session.turn
        answer = source.answer(session)
        # The last token of an answer is never computed, so it fills no block.
        filled = (session.tokens - 1) // block_size
        yield TraceEntry(
            timestamp=round(now, 3),
            input_length=prompt,
            output_length=answer,
            ids=tuple(session.blocks[:filled]),
            session=session.name,
            turn=turn,
        )
        for later, follower in source.followers(session, now + answer / TOKENS_PER_S):
            heapq.heappush(due, (later, next(order), follower, source))
