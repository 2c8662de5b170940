"""Which blocks a boundary needs: those that somebody reads, and what engines keep."""

import itertools

import pytest

from kvplugin.connectors.coverage import coverage_of, unserved
from kvplugin.contract import GroupInfo, GroupKind
from kvplugin.errors import ConfigError
from tests.offload.half import engine, group

FULL, MLA = GroupKind.FULL, GroupKind.MLA
WINDOW, LOCAL = GroupKind.SLIDING_WINDOW, GroupKind.CHUNKED_LOCAL
STATE = GroupKind.MAMBA


def read_by(group: GroupInfo, boundary: int) -> set[int]:
    """Tokens before the boundary whose KV the token there reads."""
    before = range(boundary)
    if group.kind is WINDOW:
        before = range(max(0, boundary - group.window + 1), boundary)
    elif group.kind is LOCAL:
        before = range(boundary // group.window * group.window, boundary)
    elif group.kind is STATE:
        before = range(max(0, boundary - 1), boundary)
    return set(before)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    ("kind", "window"),
    [
        *((FULL, 0), (MLA, 0), (STATE, 0)),
        *itertools.product((WINDOW, LOCAL), (1, 2, 3, 4, 7, 8, 9)),
    ],
)
def test_a_boundary_needs_the_blocks_that_are_read_and_no_others(
    kind: GroupKind, window: int, size: int
) -> None:
    info = group(kind, size=size, window=window)
    coverage = coverage_of(info)
    for local, boundary in itertools.combinations_with_replacement(
        range(0, 25, size), 2
    ):
        needed = range(coverage.first(local, boundary), boundary // size)
        read = {at // size for at in read_by(info, boundary) if at >= local}
        if boundary == local:
            read = set()
        assert set(needed) == read, (local, boundary)


@pytest.mark.parametrize("extra", [0, 1, 3, 8])
def test_history_that_is_kept_for_drafts_is_restored_too(extra: int) -> None:
    coverage = coverage_of(group(WINDOW, size=2, window=4, extra_history=extra))
    for boundary in range(0, 41, 2):
        reads = range(max(0, boundary - 3 - extra), boundary)
        assert coverage.first(0, boundary) == min(reads, default=0) // 2


@pytest.mark.parametrize("kind", [WINDOW, LOCAL])
def test_a_block_that_a_step_completes_is_alive_in_it(kind: GroupKind) -> None:
    for window, computed in itertools.product(range(1, 12), range(30)):
        alive = coverage_of(group(kind, window=window)).alive(computed)
        assert alive <= computed // 4


def test_more_of_a_group_is_needed_for_no_shorter_local_hit_or_boundary() -> None:
    for info in (
        *(group(WINDOW, window=w) for w in (1, 5, 9)),
        *(group(LOCAL, window=w) for w in (4, 6, 16)),
        group(STATE),
        group(FULL),
    ):
        first = coverage_of(info).first
        for local, boundary in itertools.combinations(range(0, 60, 4), 2):
            assert first(local, boundary) <= first(local, boundary + 4)
            assert first(local, boundary) <= first(local + 4, boundary + 4)


@pytest.mark.parametrize("kind", [GroupKind.CROSS_ATTENTION, GroupKind.OTHER])
def test_a_kind_that_is_not_served_is_named(kind: GroupKind) -> None:
    assert kind in unserved(engine(group(FULL), group(kind, 1)))
    with pytest.raises(ConfigError, match=kind):
        coverage_of(group(kind))


def test_what_cannot_be_found_again_is_left_alone() -> None:
    scratch = group(GroupKind.OTHER, 1, reusable=False)
    assert not unserved(engine(group(FULL), scratch))
    assert "no KV cache" in unserved(engine(scratch))
    assert "no KV cache" in unserved(engine())


@pytest.mark.parametrize("kind", [WINDOW, LOCAL])
def test_a_window_of_no_tokens_is_refused(kind: GroupKind) -> None:
    with pytest.raises(ConfigError, match="no window"):
        coverage_of(group(kind))
