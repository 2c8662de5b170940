"""What a grant gives, and how rows are cut, against a count of single tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplugin.connectors.nixl.boundary import Boundaries, Grant, PeerRow, checked
from kvplugin.connectors.nixl.wire import Granted
from kvplugin.contract import EngineInfo, GroupInfo, GroupKind
from kvplugin.errors import ConfigError, TransferError

FULL, MLA, STATE = GroupKind.FULL, GroupKind.MLA, GroupKind.MAMBA
WINDOW, LOCAL = GroupKind.SLIDING_WINDOW, GroupKind.CHUNKED_LOCAL


def group(kind: GroupKind, size: int, index: int = 0, **more: int) -> GroupInfo:
    return GroupInfo(index, kind, size, {}, **more)


def boundaries(*groups: GroupInfo) -> Boundaries:
    return Boundaries(EngineInfo("e", groups, 10_000, 16))


def read_by(info: GroupInfo, place: int) -> range:
    """Tokens before `place` that the token there reads, and what is kept for drafts."""
    if info.kind is WINDOW:
        return range(max(0, place - info.window + 1 - info.extra_history), place)
    if info.kind is LOCAL:
        return range(place // info.window * info.window, place)
    return range(place)


@dataclass
class Case:
    """Rows of both sides; entry i of a peer's row is about its tokens i * size on."""

    groups: list[GroupInfo]
    sizes: list[int]
    """Of the peer."""
    theirs: list[list[int]]
    """Whole rows; 0 for what is not there."""
    named: list[int]
    """How many entries at the end of each row the grant names."""
    num_tokens: int
    agreed: int
    local: int
    limit: int

    @property
    def grant(self) -> Grant:
        rows = []
        for size, row, named in zip(self.sizes, self.theirs, self.named, strict=True):
            ids = row[len(row) - named :]
            first = len(row) - named
            rows.append(PeerRow(size, first, ids, [7 * block for block in ids]))
        return Grant(self.num_tokens, rows, 30.0)

    def has(self, index: int, token: int) -> bool:
        row, place = self.theirs[index], token // self.sizes[index]
        return bool(row[place]) and place >= len(row) - self.named[index]

    def serves(self, end: int) -> bool:
        """Token by token."""
        for index, info in enumerate(self.groups):
            if info.kind is STATE:
                if end != self.num_tokens or not self.has(index, end - 1):
                    return False
                continue
            needed = (t for t in read_by(info, end) if t >= self.local)
            if not all(self.has(index, token) for token in needed):
                return False
        return True

    @property
    def largest(self) -> int:
        most = min(self.agreed, self.limit)
        if any(g.has_drafter for g in self.groups) and not self.has_states:
            most = min(most, self.agreed - 1)
        ends = range(most, self.local, -1)
        return next((end for end in ends if self.serves(end)), self.local)

    @property
    def has_states(self) -> bool:
        return any(info.kind is STATE for info in self.groups)

    def ours(self, end: int, spare: int) -> list[list[int]]:
        """Rows of the reader: null where nothing is needed, but for `spare` blocks."""
        rows, block = [], 1000
        for info in self.groups:
            size = info.block_size
            reads = read_by(info, end)
            if info.kind is STATE:
                reads = range(end - 1, end)
            first = max(min(reads, default=end) // size - spare, 0)
            row = []
            for place in range(-(-end // size)):
                block += 1
                row.append(block if place >= first else 0)
            rows.append(row)
        return rows


@st.composite
def group_infos(draw: st.DrawFn, index: int, size: int) -> GroupInfo:
    kind = draw(st.sampled_from([FULL, MLA, WINDOW, WINDOW, LOCAL, STATE]))
    more = {}
    if kind in (WINDOW, LOCAL):
        more["window"] = draw(st.integers(1, 400))
    if kind is WINDOW:
        more["extra_history"] = draw(st.sampled_from([0, 0, 3]))
    drafts = draw(st.sampled_from([False, False, False, True]))
    return GroupInfo(index, kind, size, {}, has_drafter=drafts, **more)


@st.composite
def cases(draw: st.DrawFn, sizes: st.SearchStrategy[int]) -> Case:
    count = draw(st.integers(1, 3))
    groups = [draw(group_infos(i, draw(sizes))) for i in range(count)]
    num_tokens = draw(st.integers(1, 900))
    theirs, named, peer_sizes = [], [], []
    block = 0
    for info in groups:
        size = draw(sizes)
        length = -(-num_tokens // size)
        # As engines leave them: what nobody reads any more is gone. Or hostile.
        first = min(read_by(info, num_tokens - 1), default=num_tokens) // size
        if info.kind is STATE:
            first = length - 1
        row = []
        for place in range(length):
            block += 1
            row.append(block if place >= first else 0)
        if draw(st.integers(0, 4)) == 0:
            for place in draw(st.lists(st.integers(0, length - 1), max_size=2)):
                row[place] = 0
        peer_sizes.append(size)
        theirs.append(row)
        whole = draw(st.integers(0, 4)) > 0
        named.append(length if whole else draw(st.integers(0, length)))
    unit = lcm(*(info.block_size for info in groups))
    return Case(
        groups,
        peer_sizes,
        theirs,
        named,
        num_tokens,
        agreed=draw(st.integers(0, num_tokens) | st.just(num_tokens)),
        local=draw(st.integers(0, 3)) * unit if unit < 300 else 0,
        limit=draw(st.integers(0, 1000)),
    )


SMALL = st.integers(1, 24)
LARGE = st.integers(16, 256) | st.sampled_from([16, 32, 64, 128, 256])


@settings(max_examples=400, deadline=None)
@given(cases(SMALL | LARGE))
def test_the_boundary_is_the_largest_for_which_every_token_is_there(case: Case) -> None:
    found = boundaries(*case.groups)
    assert (
        found.largest(case.grant, case.agreed, case.local, case.limit) == case.largest
    )


@settings(max_examples=400, deadline=None)
@given(cases(SMALL | LARGE), st.integers(0, 2))
def test_each_token_that_is_needed_is_read_from_its_place_into_its_place(
    case: Case, spare: int
) -> None:
    end = case.largest
    if end <= case.local:
        return
    ours, grant = case.ours(end, spare), case.grant
    cut = boundaries(*case.groups).cut(grant, ours, case.local, end)
    parts = {part.group: part for part in cut.parts}
    named = {b for part in cut.parts for b in part.remote_ids}
    assert 0 not in named
    assert cut.generations == sorted((block, 7 * block) for block in named)
    unsound = []
    for index, info in enumerate(case.groups):
        part, row, size = parts.get(index), ours[index], info.block_size
        if info.kind is STATE:
            assert part is not None
            assert part.local_ids == [row[-1]]
            assert part.remote_ids == [case.theirs[index][-1]]
            assert (part.first_token, part.end_token) == (end - 1, end)
            continue
        read = range(0)
        if part is not None:
            assert 0 not in part.local_ids
            read = range(part.first_token, part.end_token)
            assert len(read)
            assert read.stop == end
            peer = case.sizes[index]
            for token in read:
                assert case.has(index, token)
                assert token >= case.local
                place = token // peer - read.start // peer
                assert part.remote_ids[place] == case.theirs[index][token // peer]
                place = token // size - read.start // size
                assert part.local_ids[place] == row[token // size]
            assert len(part.remote_ids) == (end - 1) // peer - read.start // peer + 1
            assert len(part.local_ids) == (end - 1) // size - read.start // size + 1
        needed = (t for t in read_by(info, end) if t >= case.local)
        assert all(token in read for token in needed)
        for place in range(case.local // size, end // size):
            tokens = range(place * size, (place + 1) * size)
            if row[place] and not all(token in read for token in tokens):
                unsound.append(row[place])
    assert cut.unsound == unsound


def test_the_start_of_a_larger_block_that_the_peer_has_no_more_is_named() -> None:
    """64 tokens a block there, 128 here: the window's first block here begins where
    nothing is left there."""
    info = group(WINDOW, 128, window=100)
    row = PeerRow(64, 3, [4, 5], [0, 0])  # tokens 192 to 319
    grant = Grant(300, [row], 30.0)
    found = boundaries(info)
    assert found.largest(grant, 300, 0, 299) == 299
    cut = found.cut(grant, [[0, 11, 12]], 0, 299)
    (part,) = cut.parts
    assert (part.first_token, part.end_token) == (192, 299)
    assert (part.remote_ids, part.local_ids) == ([4, 5], [11, 12])
    assert cut.unsound == [11]


def test_states_are_taken_as_they_are_or_not_at_all() -> None:
    found = boundaries(group(FULL, 16), group(STATE, 16, 1))
    grant = Grant(
        39, [PeerRow(16, 0, [1, 2, 3], [0] * 3), PeerRow(16, 2, [9], [0])], 30.0
    )
    assert found.largest(grant, 39, 0, 39) == 39
    assert found.largest(grant, 39, 16, 39) == 39
    assert found.largest(grant, 38, 0, 39) == 0, "other tokens behind"
    assert found.largest(grant, 39, 0, 38) == 0, "the last token is not left away"
    with pytest.raises(TransferError, match="no state after 32"):
        found.cut(grant, [[1, 2, 3], [0, 0, 7]], 0, 32)


@pytest.mark.parametrize(
    ("rows", "end"),
    [
        ([[1, 2]], 40),
        ([[1, 0, 3]], 40),
        ([[]], 40),
        ([[1, 2, 3, 4, 5]], 70),
    ],
)
def test_rows_without_room_are_refused(rows: list[list[int]], end: int) -> None:
    grant = Grant(40, [PeerRow(16, 0, [1, 2, 3], [0] * 3)], 30.0)
    with pytest.raises(TransferError):
        boundaries(group(FULL, 16)).cut(grant, rows, 0, end)


def granted(**changes: object) -> Granted:
    fields: dict[str, object] = {
        "num_tokens": 40,
        "block_ids": [[1, 2, 3], [0, 5, 6]],
        "generations": [[0, 0, 0], [0, 4, 4]],
        "token_digests": [],
        "seconds": 30.0,
    }
    return Granted(**{**fields, **changes})


def rows_of(grant: Grant) -> list[tuple[int, Sequence[int]]]:
    return [(row.first, list(row.ids)) for row in grant.rows]


def test_a_grant_that_makes_sense_is_taken() -> None:
    assert rows_of(checked(granted(), [16, 16], 10)) == [(0, [1, 2, 3]), (0, [0, 5, 6])]
    short = granted(block_ids=[[1, 2, 3], [6]], generations=[[0, 0, 0], [4]])
    assert rows_of(checked(short, [16, 16], 10)) == [(0, [1, 2, 3]), (2, [6])]


@pytest.mark.parametrize(
    "changes",
    [
        {"num_tokens": 0},
        {"num_tokens": -5},
        {"num_tokens": 2**62},
        {"num_tokens": 32},
        {"block_ids": [[1, 2, 3]]},
        {"block_ids": [[1, 2, 3], [0, 5, 6], [1]]},
        {"generations": [[0, 0, 0]]},
        {"generations": [[0, 0, 0], [0, 4]]},
        {"generations": [[0, 0, -1], [0, 4, 4]]},
        {"generations": [[0, 0, 2**63], [0, 4, 4]]},
        {"block_ids": [[1, 2, 10], [0, 5, 6]]},
        {"block_ids": [[1, 2, -1], [0, 5, 6]]},
        {"block_ids": [[1] * 4, [0, 5, 6]], "generations": [[0] * 4, [0, 4, 4]]},
        {"seconds": 0.0},
        {"seconds": -1.0},
        {"seconds": float("nan")},
        {"seconds": float("inf")},
        {"seconds": 1e300},
    ],
    ids=str,
)
def test_a_grant_that_makes_none_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(TransferError, match="grant"):
        checked(granted(**changes), [16, 16], 10)


def test_kinds_that_cannot_be_read_are_named() -> None:
    with pytest.raises(ConfigError, match="cross_attention"):
        boundaries(group(FULL, 16), group(GroupKind.CROSS_ATTENTION, 16, 1))
    with pytest.raises(ConfigError, match="no KV cache"):
        boundaries()


def test_a_hostile_row_of_holes_takes_no_time() -> None:
    holes = [block if block % 2 else 0 for block in range(1, 60_001)]
    grant = Grant(
        60_000,
        [PeerRow(1, 0, holes, [0] * 60_000), PeerRow(1, 0, holes[1:], [0] * 59_999)],
        30.0,
    )
    found = boundaries(group(WINDOW, 1, window=4), group(WINDOW, 1, 1, window=4))
    assert found.largest(grant, 60_000, 0, 60_000) == 0
