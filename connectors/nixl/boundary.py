"""How many tokens another engine's grant gives a request, and what to read for them.

With T tokens credited beyond a local hit of L, every token of a dense group from L to
T is needed, of a window those that the token at T reads, and of states the one after T
tokens. A grant is about N tokens, and names of each group the blocks at the end of its
row: so T can be anything up to N of dense groups, but only N itself of states, and
little less of a window, whose older blocks are gone.

T leaves the request's last token away: engines compute that one in any case, and of a
window it would need a token more than engines keep for T.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kvplugin.connectors.coverage import Coverage, coverage_of
from kvplugin.connectors.nixl.describe import is_handed_over
from kvplugin.connectors.nixl.messages import GroupRead
from kvplugin.connectors.nixl.wire import Granted
from kvplugin.contract import EngineInfo, GroupInfo, GroupKind
from kvplugin.errors import ConfigError, TransferError
from kvplugin.spec import cdiv

_MOST_TOKENS: Final = 1 << 27
"""Of a grant."""
_MOST_SECONDS: Final = 7 * 86_400.0


@dataclass(frozen=True, slots=True)
class PeerRow:
    """The end of one group's row in the peer's blocks."""

    block_size: int
    first: int
    """Number of the first block that is named."""
    ids: Sequence[int]
    generations: Sequence[int]
    solid: list[int] = field(init=False)
    """For each block, from which of them on there is no hole up to it, itself
    included."""

    def __post_init__(self) -> None:
        solid, start = [], 0
        for place, block in enumerate(self.ids):
            if not block:
                start = place + 1
            solid.append(start)
        object.__setattr__(self, "solid", solid)

    def solid_from(self, end: int) -> int:
        """First token from which on there is no hole before token `end`; `end`, rounded
        up to a block's end, if the block before it is not there."""
        place = cdiv(end, self.block_size) - 1 - self.first
        if not 0 <= place < len(self.ids):
            return (place + 1 + self.first) * self.block_size
        return (self.first + self.solid[place]) * self.block_size

    def cut(self, first_token: int, end: int) -> slice:
        """The entries that hold these tokens."""
        size = self.block_size
        return slice(first_token // size - self.first, cdiv(end, size) - self.first)


class Grant(NamedTuple):
    """What a peer grants, once it has been found to make sense."""

    num_tokens: int
    rows: Sequence[PeerRow]
    """By group."""
    seconds: float
    """Until the lease ends unless it is renewed."""


def checked(granted: Granted, block_sizes: Sequence[int], num_blocks: int) -> Grant:
    """A grant that came over the wire.

    Args:
        granted: it.
        block_sizes: of the peer, by group.
        num_blocks: of the peer's pool, the null block included.

    Raises:
        TransferError: it makes no sense; says what is wrong.
    """
    tokens, seconds = granted.num_tokens, granted.seconds
    if not 0 < tokens <= _MOST_TOKENS:
        raise TransferError(f"a grant of {tokens} tokens")
    if not 0 < seconds <= _MOST_SECONDS:
        raise TransferError(f"a grant for {seconds} seconds")
    groups = len(granted.block_ids), len(granted.generations)
    if groups != (len(block_sizes), len(block_sizes)):
        raise TransferError(
            f"a grant of {groups[0]} rows and {groups[1]} of generations, where the "
            f"peer has {len(block_sizes)} groups"
        )
    rows = []
    for index, size in enumerate(block_sizes):
        ids, generations = granted.block_ids[index], granted.generations[index]
        in_row = cdiv(tokens, size)
        if len(ids) != len(generations) or len(ids) > in_row:
            raise TransferError(
                f"a grant of {len(ids)} blocks and {len(generations)} generations in "
                f"group {index}, of whose blocks {tokens} tokens fill {in_row}"
            )
        if ids and not 0 <= min(ids) <= max(ids) < num_blocks:
            raise TransferError(
                f"a grant of blocks {min(ids)} to {max(ids)} in group {index} from a "
                f"pool of {num_blocks}"
            )
        if generations and not 0 <= min(generations) <= max(generations) < 2**63:
            raise TransferError(f"a grant of impossible generations in group {index}")
        rows.append(PeerRow(size, in_row - len(ids), ids, generations))
    return Grant(tokens, rows, seconds)


class Cut(NamedTuple):
    """What is to be read for a request."""

    parts: list[GroupRead]
    generations: list[tuple[int, int]]
    """(block of the peer, its generation) of every block that is read."""
    unsound: list[int]
    """Blocks of ours that are full when the read has ended, and hold tokens at their
    start that were not read, because the peer has them no more. Their request does not
    need these, others might."""


@dataclass(frozen=True, slots=True)
class _Group:
    info: GroupInfo
    coverage: Coverage

    @property
    def is_state(self) -> bool:
        return self.info.kind is GroupKind.MAMBA


class Boundaries:
    """Boundaries and cuts of one engine.

    Args:
        engine: which reads.

    Raises:
        ConfigError: it has a group of a kind that cannot be read from another engine.
    """

    def __init__(self, engine: EngineInfo) -> None:
        self._groups = [
            _Group(group, coverage_of(group))
            for group in engine.groups
            if is_handed_over(group)
        ]
        if not self._groups:
            raise ConfigError("the model has no KV cache that could be read")
        self._has_states = any(group.is_state for group in self._groups)
        self._has_drafter = any(group.info.has_drafter for group in self._groups)

    def largest(self, grant: Grant, agreed: int, local: int, limit: int) -> int:
        """The largest boundary, from `local` (for none at all) to `limit`.

        Args:
            grant: of the peer.
            agreed: tokens at the start of the request that are those of the grant.
            local: tokens of the local hit.
            limit: tokens that may be credited at most.
        """
        if self._has_drafter and not self._has_states:
            # What a drafter holds for a token depends on the token behind it.
            limit = min(limit, agreed - 1)
        end, before = min(agreed, limit), -1
        while local < end != before:
            before = end
            for group in self._groups:
                row = grant.rows[group.info.index]
                if local < end:
                    end = self._served(group, row, grant.num_tokens, local, end)
        return max(end, local)

    def _served(
        self, group: _Group, row: PeerRow, num_tokens: int, local: int, end: int
    ) -> int:
        """The largest boundary up to `end` for which the group has what it needs."""
        if group.is_state:
            return end if end == num_tokens and row.ids and row.ids[-1] else local
        begins = group.coverage.begins
        needed = max(local, begins(end))
        solid = row.solid_from(end)
        if needed >= end or solid <= needed:
            return end
        # The block before `solid` is missing, and any boundary behind its start needs
        # it, but one at which nothing is needed, as where a chunk ends.
        hole = solid - row.block_size
        lower = needed if begins(needed) == needed else local
        if hole < row.first * row.block_size:
            return lower
        return min(end, max(hole, lower))

    def cut(
        self, grant: Grant, rows: Sequence[Sequence[int]], local: int, end: int
    ) -> Cut:
        """What fills our rows from token `local` to `end`.

        Args:
            grant: of the peer.
            rows: of ours, by group, whole.
            local: tokens that they hold already.
            end: a boundary that the grant gives (`largest`).

        Raises:
            TransferError: our rows have no room where tokens are needed.
        """
        if self._has_states and end != grant.num_tokens:
            raise TransferError(f"the peer has no state after {end} tokens")
        parts: list[GroupRead] = []
        generations: dict[int, int] = {}
        unsound: list[int] = []
        for group in self._groups:
            theirs, ours = grant.rows[group.info.index], rows[group.info.index]
            find = _state if group.is_state else _tokens
            part, taken = find(group, theirs, ours, local, end)
            if part is not None:
                parts.append(part)
                generations.update(
                    zip(theirs.ids[taken], theirs.generations[taken], strict=True)
                )
            if not group.is_state:
                first = end if part is None else part.first_token
                size = group.info.block_size
                full = range(local // size, min(cdiv(first, size), end // size))
                unsound += [ours[place] for place in full if ours[place]]
        return Cut(parts, sorted(generations.items()), unsound)

    def to_fill(self, rows: Sequence[Sequence[int]], local: int, end: int) -> list[int]:
        """Blocks of ours from token `local` to `end`."""
        blocks = []
        for group in self._groups:
            size = group.info.block_size
            row = rows[group.info.index][max(local, 0) // size : cdiv(end, size)]
            blocks += [block for block in row if block]
        return blocks

    def row_tokens(self, rows: Sequence[Sequence[int]]) -> int:
        """Tokens that rows of this length have room for in every group."""
        groups = self._groups
        return min(len(rows[g.info.index]) * g.info.block_size for g in groups)


def _state(
    group: _Group, theirs: PeerRow, ours: Sequence[int], local: int, end: int
) -> tuple[GroupRead | None, slice]:
    del local
    if not (theirs.ids and theirs.ids[-1]):
        raise TransferError(f"the peer has no state of group {group.info.index}")
    place = cdiv(end, group.info.block_size) - 1
    block = ours[place] if place < len(ours) else 0
    if not block:
        raise TransferError(
            f"group {group.info.index} has no memory for the state after {end} tokens"
        )
    index = group.info.index
    part = GroupRead(index, end - 1, end, list(theirs.ids[-1:]), [block])
    return part, slice(len(theirs.ids) - 1, len(theirs.ids))


def _tokens(
    group: _Group, theirs: PeerRow, ours: Sequence[int], local: int, end: int
) -> tuple[GroupRead | None, slice]:
    """All that the peer has of the blocks that our row has: they get hashes."""
    size, index = group.info.block_size, group.info.index
    needed = max(local, group.coverage.begins(end))
    last = cdiv(end, size)
    place = last
    while place > local // size and place <= len(ours) and ours[place - 1]:
        place -= 1
    if needed < end and (place > needed // size or len(ours) < last):
        raise TransferError(
            f"group {index} has no memory for tokens {needed} to {end}: the last "
            f"{last - place} of {last} blocks are there"
        )
    first = max(local, place * size, theirs.solid_from(end))
    if needed < min(first, end):
        raise TransferError(f"the peer has not all of group {index} up to token {end}")
    if first >= end:
        return None, slice(0)
    taken = theirs.cut(first, end)
    part = GroupRead(
        index,
        first,
        end,
        list(theirs.ids[taken]),
        list(ours[first // size : last]),
    )
    return part, taken
