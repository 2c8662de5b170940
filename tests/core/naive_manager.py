"""A KV-cache manager as one would write it without a thought for speed: the model.

Two things are kept of each block: the prefix whose bytes it *holds* and the prefix
under which it is *keyed*. All rules follow from what an attention type reads and are
answered by looking through sets; nothing is shared with the code under test.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import Any

Prefix = tuple[Any, ...]
"""Identity of a request, then its first tokens."""


def up(a: int, b: int) -> int:
    """`a / b`, rounded up."""
    return (a + b - 1) // b


@dataclass(frozen=True)
class Group:
    """What is to be known of a group: `kind` is full, window, chunk, state (one a
    block of tokens) or last_state (mode ``align``)."""

    kind: str
    block_size: int
    reach: int = 0
    """Tokens of the window or chunk."""
    drafts: int = 0
    """States beside the running one."""

    @property
    def is_state(self) -> bool:
        return self.kind in ("state", "last_state")

    def first_read(self, n: int) -> int:
        """First position that the token at position `n` needs."""
        if self.kind == "full":
            return 0
        if self.kind == "window":
            return max(n - self.reach + 1, 0)
        if self.kind == "chunk":
            return n // self.reach * self.reach
        return max(n - 1, 0)

    def needed(self, n: int) -> range:
        """Blocks that must be there for the token at position `n`: those it reads."""
        return range(self.first_read(n) // self.block_size, up(n, self.block_size))

    def row_length(self, slots: int, main: int) -> int:
        if self.kind == "last_state":
            slots = main
        return up(slots, self.block_size) + self.drafts

    def most_live(self, budget: int, max_len: int) -> int:
        """Most blocks that a request owns at a time, in any alignment."""
        if self.kind == "last_state":
            return 2 + self.drafts
        back = {"window": self.reach - 1, "chunk": self.reach, "state": 1}
        tokens = back.get(self.kind, max_len) + budget
        return up(min(tokens, max_len), self.block_size) + 1 + self.drafts


@dataclass
class Holder:
    """A request that has blocks."""

    identity: Any
    tokens: Sequence[int]
    rows: list[list[int]]
    nulls: list[int]
    """Leading blocks given back or never taken, by group."""
    keyed_to: int
    """Tokens whose full blocks were given a key, or had one when they were hit."""
    allocated: bool = False

    def prefix(self, n: int) -> Prefix:
        return (self.identity, *self.tokens[:n])


@dataclass
class NaiveManager:
    groups: Sequence[Group]
    num_blocks: int
    drafts: bool
    """Whether a draft model needs the block behind a hit."""
    holders: dict[str, Holder] = field(default_factory=dict)
    bytes: dict[int, tuple[int, Prefix]] = field(default_factory=dict)
    keys: dict[int, tuple[int, Prefix]] = field(default_factory=dict)
    fresh_states: set[tuple[int, Prefix]] = field(default_factory=set)
    """Keys of states given in this step: nobody can copy from them yet."""

    # -- lookup --------------------------------------------------------------------

    @property
    def alignment(self) -> int:
        return lcm(*(group.block_size for group in self.groups))

    def longest_hit(self, prefix: Any, max_tokens: int) -> int:
        """The longest prefix that every group can start from."""
        known = set(self.keys.values())
        for n in range(max_tokens // self.alignment * self.alignment, 0, -1):
            if n % self.alignment == 0 and self.can_start(prefix, n, known):
                return n
        return 0

    def can_start(self, prefix: Any, n: int, known: Any) -> bool:
        for g, group in enumerate(self.groups):
            size, wanted = group.block_size, list(group.needed(n))
            if self.drafts and not group.is_state:
                wanted.append(n // size)
            for i in wanted:
                if len(prefix((i + 1) * size)) <= (i + 1) * size:
                    return False  # the request is shorter
                if (g, prefix((i + 1) * size)) not in known:
                    return False
        return True

    def assert_serves(self, rows: Sequence[Sequence[int]], prefix: Any, n: int) -> None:
        """These blocks hold what a request with this prefix reads after `n` tokens."""
        for g, (group, row) in enumerate(zip(self.groups, rows, strict=True)):
            assert len(row) == n // group.block_size
            for i, block in enumerate(row):
                if block or i in group.needed(n):
                    assert self.keys[block] == (g, prefix((i + 1) * group.block_size))

    # -- blocks --------------------------------------------------------------------

    @property
    def used(self) -> set[int]:
        held = {b for h in self.holders.values() for row in h.rows for b in row}
        return held - {0}

    @property
    def free(self) -> int:
        return self.num_blocks - 1 - len(self.used)

    def give_back(self, name: str, settled: int) -> None:
        """After `settled` tokens: what no later token reads."""
        holder = self.holders.get(name)
        for g, group in enumerate(self.groups if holder else ()):
            n = max(settled - group.drafts, 0)
            gone = min(group.first_read(n) // group.block_size, len(holder.rows[g]))
            if group.kind == "last_state":
                continue  # which state goes when is told by the states that are read
            for i in range(holder.nulls[g], gone):
                holder.rows[g][i] = 0
            holder.nulls[g] = max(holder.nulls[g], gone)

    def need(
        self,
        name: str,
        hits: Sequence[Sequence[int]],
        computed: int,
        main: int,
        slots: int,
    ) -> int:
        """Free blocks that room for `slots` tokens takes."""
        holder, needed = self.holders.get(name), 0
        hits = hits or [[] for _ in self.groups]
        for g, group in enumerate(self.groups):
            length = group.row_length(slots, main)
            have = len(holder.rows[g]) if holder else len(hits[g])
            if group.kind == "last_state":
                first = holder is None or not holder.allocated
                if length > have:
                    needed += 1 + group.drafts if first else 1
                needed += sum(block not in self.used for block in hits[g] if block)
                continue
            skipped = 0
            if holder is None:
                skipped = group.first_read(computed) // group.block_size
                kept = hits[g][skipped:]
                needed += sum(block not in self.used for block in kept if block)
            needed += max(length - max(have, skipped), 0)
        return needed

    def admit(
        self, name: str, identity: Any, tokens: Sequence[int], local: int, computed: int
    ) -> None:
        """A request gets its rows; `local` of its `computed` tokens are hits."""
        nulls = [g.first_read(computed) // g.block_size for g in self.groups]
        rows: list[list[int]] = [[] for _ in self.groups]
        self.holders[name] = Holder(identity, tokens, rows, nulls, keyed_to=local)

    def receive(
        self, name: str, rows: Sequence[Sequence[int]], hits: Sequence[Sequence[int]]
    ) -> None:
        """The rows that the manager made; what is new in them must have been free."""
        holder, used = self.holders[name], self.used
        victims: list[int] = []
        for g, row in enumerate(rows):
            had = {0, *holder.rows[g], *(hits[g][holder.nulls[g] :] if hits else ())}
            new = [block for block in row if block not in had]
            assert not used & set(new)
            assert len(set(new)) == len(new)
            victims += [block for block in new if self.keys.pop(block, None)]
            for block in new:
                self.bytes.pop(block, None)
            holder.rows[g] = list(row)
            used |= set(new)
        if victims:
            idle = set(range(1, self.num_blocks)) - self.used
            assert idle <= self.keys.keys(), "a key was lost without need"

    def key(self, name: str, upto: int) -> None:
        """The full blocks among the first `upto` tokens can be hit from now on."""
        holder = self.holders[name]
        for g, group in enumerate(self.groups):
            for i in range(
                holder.keyed_to // group.block_size, upto // group.block_size
            ):
                block = holder.rows[g][i]
                if block and block not in self.keys:
                    end = (i + 1) * group.block_size
                    self.keys[block] = (g, holder.prefix(end))
                    if group.is_state:
                        self.fresh_states.add(self.keys[block])
        holder.keyed_to = max(holder.keyed_to, upto)

    def drop_keys(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.keys.pop(block, None)

    # -- bytes ---------------------------------------------------------------------

    def write(self, name: str, start: int, stop: int, *, is_step: bool) -> None:
        """Tokens [start, stop) are computed (or loaded): their bytes are there."""
        holder = self.holders[name]
        for g, group in enumerate(self.groups):
            size = group.block_size
            for i in range(start // size, up(stop, size)):
                block, end = holder.rows[g][i], min((i + 1) * size, stop)
                if not block:
                    unread = group.is_state and end < stop
                    assert unread or (not is_step and end <= group.first_read(stop))
                    continue
                inside = group.kind == "last_state" and end < stop
                right = not inside or stop - start <= 1 + group.drafts
                mine = holder.prefix(end) if right else ()
                old = self.bytes.get(block, (g, ()))
                if not group.is_state and old[1][: len(mine)] == mine:
                    mine = old[1]  # written again; what is behind it stays
                self.bytes[block] = (g, mine)

    def reads(self, name: str, n: int) -> bool:
        """Whether the token at position `n` finds all that it reads."""
        holder = self.holders[name]
        for g, group in enumerate(self.groups):
            for i in group.needed(n):
                block = holder.rows[g][i] if i < len(holder.rows[g]) else 0
                held = self.bytes.get(block, (g, ()))
                mine = holder.prefix(min((i + 1) * group.block_size, n))
                if group.is_state and i == (n - 1) // group.block_size:
                    mine = holder.prefix(n)
                if not block or held[0] != g or held[1][: len(mine)] != mine:
                    return False
                if group.is_state and held[1] != mine:
                    return False
        return True

    def spoil(self, name: str, position: int) -> set[int]:
        """Bytes from `position` on are wrong; the blocks."""
        spoilt: set[int] = set()
        for g, group in enumerate(self.groups):
            row = self.holders[name].rows[g]
            spoilt |= set(row[position // group.block_size :])
        spoilt.discard(0)
        for block in spoilt:
            self.bytes[block] = (-1, ())
        return spoilt

    def first_spoilt(self, name: str) -> int | None:
        """First position of a request whose bytes are wrong."""
        return min(
            (
                i * group.block_size
                for g, group in enumerate(self.groups)
                for i, block in enumerate(self.holders[name].rows[g])
                if self.bytes.get(block) == (-1, ())
            ),
            default=None,
        )

    def states_behind(self, name: str, n: int) -> set[int]:
        """States that a request overwrites if it computes again from position `n`."""
        rows = self.holders[name].rows
        states: set[int] = set()
        for group, row in zip(self.groups, rows, strict=True):
            if group.is_state:
                states |= set(row[n // group.block_size :])
        return states - {0}

    def can_go_back(self, name: str, n: int) -> bool:
        """Whether a request could compute again from position `n`."""
        rows = self.holders[name].rows
        behind = [
            block
            for g, group in enumerate(self.groups)
            for block in rows[g][n // group.block_size :]
        ]
        return all(behind) and self.reads(name, n)
