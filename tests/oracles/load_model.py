"""A worker whose memory shows what it reads: the value of a token in a block is made
from all values before it, so one wrong block changes every later one, and the text."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

VOCABULARY = 90


@dataclass(frozen=True)
class Load:
    """Tokens [begin, end) that a connector promised to bring."""

    name: str
    row: list[list[int]]
    tokens: list[int]
    begin: int
    end: int


def value(below: int, place: int, before: Sequence[int]) -> int:
    """Of a token in a group: from the layer below and all that it attends to."""
    mixed = 0
    for one in before:
        mixed ^= one
    return hash((below, place, mixed))


@cache
def _truth(tokens: tuple[int, ...], windows: tuple[int | None, ...]) -> Any:
    if not tokens:
        return tuple(() for _ in windows)
    before = _truth(tokens[:-1], windows)
    place, below = len(tokens) - 1, tokens[-1]
    values = []
    for done, window in zip(before, windows, strict=True):
        first = 0 if window is None else max(place - window + 1, 0)
        below = value(below, place, done[first:])
        values.append((*done, below))
    return tuple(values)


def truth(
    tokens: tuple[int, ...], windows: Sequence[int | None]
) -> tuple[tuple[int, ...], ...]:
    """Values of all tokens, by group, that a sound engine computes."""
    return _truth(tokens, tuple(windows))


class Memory:
    """Blocks of all groups, as each group sees them."""

    def __init__(self, block_size: int, groups: int) -> None:
        self.size = block_size
        self.groups = groups
        self._values: dict[tuple[int, int], int] = {}

    def read(self, group: int, row: Sequence[int], place: int) -> int:
        key = row[place // self.size] * self.size + place % self.size
        return self._values.get((group, key), -1)

    def write(self, group: int, row: Sequence[int], place: int, what: int) -> None:
        key = row[place // self.size] * self.size + place % self.size
        self._values[group, key] = what

    def block(self, group: int, block_id: int) -> list[int]:
        return [self.read(group, [block_id], i) for i in range(self.size)]

    def load(
        self, load: Load, windows: Sequence[int | None], fails_at: int | None
    ) -> set[int]:
        """Bring a load; from its block `fails_at` on everything is wrong.

        Returns:
            ids of the wrong blocks.
        """
        values = truth(tuple(load.tokens[: load.end]), windows)
        bad: set[int] = set()
        for group, row in enumerate(load.row):
            for place in range(load.begin, load.end):
                block = row[place // self.size]
                if block == 0:
                    continue
                nth = place // self.size - load.begin // self.size
                is_bad = fails_at is not None and nth >= fails_at
                if is_bad:
                    bad.add(block)
                right = values[group][place]
                self.write(group, row, place, -7 if is_bad else right)
        return bad


class Worker:
    """Executes steps in their order, as vLLM's first model runner reads them."""

    def __init__(self, memory: Memory, windows: Sequence[int | None]) -> None:
        self._memory = memory
        self._windows = windows
        self._rows: dict[str, list[list[int]]] = {}
        self._tokens: dict[str, list[int]] = {}

    @staticmethod
    def sample(values: Sequence[Sequence[int]]) -> int:
        """The next token after the last value of each group."""
        return hash(tuple(group[-1] for group in values)) % VOCABULARY + 2

    def execute(self, output: Any) -> dict[str, list[int]]:
        """What a step samples, by request."""
        for name in output.finished_req_ids:
            self._rows.pop(name, None)
        begins = self._take(output)
        return {
            name: self._compute(name, begins[name], n)
            for name, n in output.num_scheduled_tokens.items()
        }

    def _take(self, output: Any) -> dict[str, int]:
        begins = {}
        for new in output.scheduled_new_reqs:
            begins[new.req_id] = new.num_computed_tokens
            self._rows[new.req_id] = [list(ids) for ids in new.block_ids]
            self._tokens[new.req_id] = list(new.prompt_token_ids)
        cached = output.scheduled_cached_reqs
        for i, name in enumerate(cached.req_ids):
            begins[name] = cached.num_computed_tokens[i]
            blocks = cached.new_block_ids[i]
            if name in cached.resumed_req_ids:
                self._rows[name] = [list(ids) for ids in blocks]
            elif blocks is not None:
                for row, more in zip(self._rows[name], blocks, strict=True):
                    row.extend(more)
            if name in cached.all_token_ids:
                self._tokens[name] = list(cached.all_token_ids[name])
        return begins

    def _compute(self, name: str, begin: int, n: int) -> list[int]:
        tokens, rows = self._tokens[name], self._rows[name]
        last: list[list[int]] = []
        for place in range(begin, begin + n):
            below, last = tokens[place], []
            for group, (row, window) in enumerate(
                zip(rows, self._windows, strict=True)
            ):
                first = 0 if window is None else max(place - window + 1, 0)
                before = [self._memory.read(group, row, i) for i in range(first, place)]
                below = value(below, place, before)
                self._memory.write(group, row, place, below)
                last.append([below])
        if begin + n < len(tokens):
            return []
        tokens.append(self.sample(last))
        return tokens[-1:]
