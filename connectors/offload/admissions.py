"""Admissions: which requests have something to store, and what they hold meanwhile."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from kvplugin.connectors.offload.checkpoints import Checkpoints
from kvplugin.connectors.offload.chunks import Chunk, Chunking
from kvplugin.connectors.offload.holding import Holding
from kvplugin.connectors.offload.host_tier import HostTier
from kvplugin.connectors.offload.requests import RequestState

_ENDLESS: Final = 1 << 62
"""Tokens of a request whose end is not known."""


@dataclass(slots=True)
class Admission:
    """One stay of a request in the engine, as far as something of it is stored.

    Block ids belong to one admission: a preempted request gets a new row, while jobs
    of the old one go on with references of their own.
    """

    rows: dict[int, list[int]]
    """Engine blocks of each group that is offloaded."""
    last: int
    """Tokens of the request up to which there is something to store."""
    holding: Holding
    next_chunk: dict[int, int]
    """Of each group: chunks before this one need no store."""
    checkpoints: Mapping[int, Collection[int]]
    """Of groups of states: tokens after which one is kept; all where a group is not
    named."""
    is_new: bool = True
    """Nothing has been planned for it yet."""
    until: int = 0
    """Tokens before which a step brings nothing new to store."""
    hole: int | None = None
    """Token from which on nothing is stored, since the offload policy refused what is
    there: what lies behind could never be hit."""

    def grow(self, new_blocks: Sequence[Sequence[int]]) -> None:
        """The row has grown; nothing for no group."""
        if new_blocks:
            for group, row in self.rows.items():
                row += new_blocks[group]

    def reaches(self, cuts: Iterable[Chunking], tokens: int) -> bool:
        """Whether the rows have an entry for each block of the first `tokens` tokens.
        Where one has not, the engine did not name all of it: entry i is not block i."""
        return all(
            len(self.rows[cut.index]) * cut.group.block_size >= tokens for cut in cuts
        )

    def is_based_on(self, block_ids: AbstractSet[int]) -> bool:
        """Whether one of these engine blocks is in a row: what the request has may
        have been computed from it."""
        return any(not block_ids.isdisjoint(row) for row in self.rows.values())

    def block(self, cut: Chunking, number: int) -> int:
        """Engine block of the group's block `number`; 0 where it has none."""
        row = self.rows[cut.index]
        return row[number] if number < len(row) else 0

    def blocks(self, cut: Chunking, chunk: Chunk) -> list[int]:
        """Engine blocks of a chunk."""
        return [self.block(cut, number) for number in cut.engine_blocks(chunk)]

    def given(self, cut: Chunking, end: int) -> int:
        """Tokens up to which the engine has given memory to all new chunks of a dense
        group that end at token `end` or before; `end` if to all."""
        first = self.next_chunk[cut.index] * cut.blocks
        last = max(end // cut.tokens * cut.blocks, first)
        new = self.rows[cut.index][first:last]
        if len(new) == last - first and 0 not in new:
            return end
        blocks = first + (new.index(0) if 0 in new else len(new))
        return blocks // cut.blocks * cut.tokens

    def new_chunks(self, cut: Chunking, end: int) -> range:
        """Numbers of a dense group's new chunks up to token `end`; moves on to them."""
        first = self.next_chunk[cut.index]
        self.next_chunk[cut.index] = last = max(first, end // cut.tokens)
        return range(first, last)


class Admissions:
    """Begins and ends them, and knows all that is held.

    Args:
        cuts: the groups that are kept.
        tier: where they are kept.
        checkpoints: which states are kept.
        prompt_only: of prompts alone.
    """

    def __init__(
        self,
        cuts: Sequence[Chunking],
        tier: HostTier,
        checkpoints: Checkpoints,
        *,
        prompt_only: bool,
    ) -> None:
        self.watched: dict[str, None] = {}
        """Ids of requests that still have something to store."""
        self._cuts = cuts
        self._tier = tier
        self._checkpoints = checkpoints
        self._prompt_only = prompt_only
        self._holdings: dict[Holding, None] = {}

    def begin(self, state: RequestState, block_ids: Sequence[Sequence[int]]) -> None:
        """A request has its row."""
        self.stop(state)
        last = self._last(state)
        if not last:
            return
        holding = Holding(self._tier)
        self._holdings[holding] = None
        state.admission = Admission(
            rows={cut.index: list(block_ids[cut.index]) for cut in self._cuts},
            last=last,
            holding=holding,
            next_chunk={cut.index: 0 for cut in self._cuts},
            checkpoints=self._checkpoints.of(state.request),
        )
        self.watched[state.request.request_id] = None

    def _last(self, state: RequestState) -> int:
        if not self._prompt_only:
            return _ENDLESS
        tokens = state.request.num_prompt_tokens
        return max(tokens // cut.tokens * cut.tokens for cut in self._cuts)

    def stop(self, state: RequestState) -> None:
        """Nothing more is stored of the request's present admission."""
        admission, state.admission = state.admission, None
        if admission is not None:
            del self.watched[state.request.request_id]
            admission.holding.close()
            self.prune(admission.holding)

    def forget_all(self, states: Iterable[RequestState]) -> None:
        """The tier was cleared: who runs stores nothing more, and holds nothing."""
        for state in states:
            self.stop(state)
        for holding in list(self._holdings):
            holding.abandon()
            self.prune(holding)

    def prune(self, holding: Holding) -> None:
        """A store of it has ended: it may be over."""
        if holding.is_over:
            self._holdings.pop(holding, None)

    def uses(self) -> Iterator[tuple[int, int]]:
        """(group, slot) of each reference that requests have."""
        for holding in self._holdings:
            yield from holding.uses()
