"""Generated traces: the same each time, and shaped as they say."""

from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import pytest

from kvplugin.errors import ConfigError
from kvplugin.replay import TraceEntry, read_trace
from kvplugin.replay.generate import CHAT, KINDS, generate, write_generated
from kvplugin.replay.sessions import Spread
from kvplugin.replay.summary import summarize

REQUESTS = 2_000


def entries_of(kind: str, seed: int = 0, block_size: int = 64) -> list[TraceEntry]:
    return [*generate(kind, REQUESTS, seed, block_size)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_arguments_give_the_same_bytes(tmp_path: Path, kind: str) -> None:
    paths = [tmp_path / name for name in "abc"]
    for path, seed in zip(paths, (1, 1, 2), strict=True):
        write_generated(path, kind, 300, seed)
    one, again, other = (path.read_bytes() for path in paths)
    assert one == again != other
    assert len(read_trace(paths[0]).entries) == 300


def test_bytes_have_not_changed_between_versions(tmp_path: Path) -> None:
    write_generated(tmp_path / "t", "mix", 200, 7)
    digest = sha256((tmp_path / "t").read_bytes()).hexdigest()
    assert digest[:16] == "8da8e989f7fcd401"


@pytest.mark.parametrize("kind", KINDS)
def test_entries_are_sound(kind: str) -> None:
    entries = entries_of(kind)
    assert all(one.timestamp <= two.timestamp for one, two in pairwise(entries))
    seen: dict[int | str, int | str | None] = {}
    turns: dict[str | None, int] = {}
    for entry in entries:
        filled = (entry.input_length + entry.output_length - 1) // 64
        assert len(entry.ids) == filled
        for before, block in zip((None, *entry.ids), entry.ids, strict=False):
            assert seen.setdefault(block, before) == before  # an id is a prefix
        assert entry.turn >= turns.get(entry.session, 0)
        turns[entry.session] = entry.turn + 1


def test_chats_have_turns_scans_and_popular_prompts() -> None:
    entries = entries_of("chat")
    sessions = {entry.session for entry in entries}
    assert 2.5 < len(entries) / len(sessions) < 5
    first = [entry for entry in entries if entry.turn == 0 and entry.ids]
    heads = [entry.ids[0] for entry in first]
    shared = {head for head in heads if heads.count(head) > 1}
    assert len(shared) <= CHAT.prompts
    alone = sum(head not in shared for head in heads) / len(heads)
    assert CHAT.scans * 0.7 < alone < CHAT.scans * 1.5
    popularity = sorted((heads.count(head) for head in shared), reverse=True)
    assert popularity[0] > 4 * popularity[len(popularity) // 2]


def test_tools_have_deep_prompts_bursts_and_branches() -> None:
    entries = entries_of("tools")
    trace_pauses = []
    last: dict[str | None, float] = {}
    for entry in entries:
        if entry.session in last:
            trace_pauses.append(entry.timestamp - last[entry.session])
        last[entry.session] = entry.timestamp
    assert sorted(trace_pauses)[len(trace_pauses) // 2] < 10
    assert min(entry.input_length for entry in entries) > 1_000
    branches = {entry.session for entry in entries} - {
        entry.session for entry in entries if entry.turn == 0
    }
    assert len(branches) > REQUESTS * 0.02


def test_most_of_a_mix_can_be_hit(tmp_path: Path) -> None:
    write_generated(tmp_path / "t", "mix", REQUESTS, 0)
    summary = summarize(read_trace(tmp_path / "t"))
    assert 0.7 < summary.ceiling < 0.99
    fifty, ninety, ninety_nine = summary.reuse
    assert fifty.blocks < ninety.blocks < ninety_nine.blocks
    assert fifty.seconds < ninety.seconds < ninety_nine.seconds
    assert summary.observed is None


def test_a_spread_has_its_median() -> None:
    from random import Random

    random = Random(0)
    drawn = sorted(Spread(100, 1.0).tokens(random) for _ in range(2_001))
    assert 90 < drawn[1_000] < 110


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("chats", 1, 0), "Did you mean 'chat'"),
        (("chat", 0, 0), "requests=0"),
        (("chat", 1, -1), "seed=-1"),
        (("chat", 1, 0, 0), "block_size=0"),
    ],
)
def test_refusals(arguments: tuple[str, int, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        generate(*arguments)
