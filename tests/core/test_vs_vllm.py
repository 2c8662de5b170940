"""Random engines get the same answers from our manager as from vLLM's.

Against 0.19.1 with every parity switch on, against 0.32 with none: block ids, hit
lengths, null blocks, hashes, what fits, usage, shared prefixes, events.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any

import pytest

from kvplugin.parity import V019 as V019_PARITY
from kvplugin.parity import Parity
from tests.core import vllm_drives as drives
from tests.oracles import V019, V032, ask
from tests.oracles.drive import Setup

Entry = tuple[Any, ...]
Replay = Callable[[list[Entry], Counter[Any]], Counter[Any]]


def differences(
    version: str,
    setups: list[Setup],
    format_name: str,
    parity: Parity,
    left_out: Collection[str] = (),
) -> list[str]:
    """The first difference of each run, if any."""
    found = []
    for setup, theirs in zip(setups, ask(version, "drives", setups), strict=True):
        assert isinstance(theirs, list), f"{setup} on {version}: {theirs}"
        ours = drives.transcript(setup, format_name, parity)
        difference = first_difference(
            list(comparable(theirs, left_out, replay_counted)),
            list(comparable(ours, left_out, replay_index)),
        )
        if difference:
            found.append(f"{setup}\n{difference}")
    return found


def comparable(
    transcript: list[Entry], left_out: Collection[str], replay: Replay
) -> Iterator[Entry]:
    """Events as the hashes that can be hit after them, other entries as they are."""
    known: Counter[Any] = Counter()
    for entry in transcript:
        if entry[0] in left_out:
            continue
        if entry[0] in ("free", "end", "reset"):
            known = replay(entry[-1], known)
            yield (*entry[:-1], {block_hash for block_hash, _ in known})
        else:
            yield entry


def replay_counted(events: list[Entry], known: Counter[Any]) -> Counter[Any]:
    """vLLM tells of every block that gets or loses a hash."""
    for name, hashes, *_ in events:
        if name == "AllBlocksCleared":
            return Counter()
        step = 1 if name == "BlockStored" else -1
        for block_hash in hashes:
            known[block_hash, None] += step
    return +known


def replay_index(events: list[Entry], known: Counter[Any]) -> Counter[Any]:
    """We tell when a hash of a group can be hit, and when it cannot any more."""
    for name, hashes, group, *_ in events:
        if name == "AllBlocksCleared":
            return Counter()
        for block_hash in hashes:
            known[block_hash, group] = int(name == "BlockStored")
    return +known


def first_difference(theirs: list[Entry], ours: list[Entry]) -> str:
    for i, (their, our) in enumerate(zip(theirs, ours, strict=False)):
        if their != our:
            return f"entry {i}\n  vLLM {their}\n  ours {our}"
    return "" if len(theirs) == len(ours) else "one transcript is longer"


def v019_setups(seeds: range) -> list[Setup]:
    """All that 0.19.1 survives: a rejected draft ends it where states are aligned (an
    assertion on the length of the row)."""
    aligned = drives.mamba("align"), drives.mamba("align", 1)
    return [
        setup
        for setup in drives.setups(drives.V019_MIXES, seeds)
        if not (setup.drafts and any(group in aligned for group in setup.groups))
    ]


def test_everything_is_as_in_019_with_parity() -> None:
    setups = v019_setups(range(2))
    assert differences(V019, setups, "vllm019_sha256_cbor", V019_PARITY) == []


def v032_setups(seeds: range) -> list[Setup]:
    """All but drafts with one group, where 0.32 drops a block of a prompt that is
    cached to its end, although the block behind the hit is there."""
    return [
        setup
        for setup in drives.setups(drives.MIXES, seeds)
        if not (setup.use_eagle and len(setup.groups) == 1)
    ]


NOT_IN_032 = ("common", "zero")
"""Shared prefixes are a stub there, zeroing follows other rules."""


def test_what_032_defines_alike_is_as_in_032_without_parity() -> None:
    setups = [replace(setup, admission=False) for setup in v032_setups(range(2, 4))]
    found = differences(V032, setups, "vllm032_sha256_cbor", Parity(), NOT_IN_032)
    assert found == []


@pytest.mark.full
@pytest.mark.parametrize("first", range(100, 160, 5))
def test_long_runs(first: int) -> None:
    setups = [
        replace(setup, steps=150, budget=40, max_model_len=200)
        for setup in v019_setups(range(first, first + 5))
    ]
    assert differences(V019, setups, "vllm019_sha256_cbor", V019_PARITY) == []
    setups = [
        replace(setup, steps=150, admission=False)
        for setup in v032_setups(range(first, first + 5))
    ]
    found = differences(V032, setups, "vllm032_sha256_cbor", Parity(), NOT_IN_032)
    assert found == []


def test_an_encoder_decoder_model_is_as_in_019() -> None:
    setups = [
        Setup(
            [drives.FULL, drives.CROSS],
            90,
            4,
            seed,
            enable_caching=False,
            encoder_tokens=10,
        )
        for seed in range(4)
    ]
    assert differences(V019, setups, "vllm019_sha256_cbor", V019_PARITY) == []


def test_evicted_blocks_are_as_in_019_until_they_are_written_again() -> None:
    setups = [
        Setup(groups, 10 + 50 * len(groups), 4, seed, evictions=True, events=True)
        for groups in ([drives.FULL], [drives.FULL, drives.WINDOW])
        for seed in range(4)
    ]
    assert differences(V019, setups, "vllm019_sha256_cbor", V019_PARITY) == []


def test_the_comparison_sees_a_difference() -> None:
    setup = Setup([drives.FULL, drives.WINDOW, drives.LONG_WINDOW], 160, 4, 0)
    setup = replace(setup, use_eagle=True, lookahead=2, drafts=2)
    assert differences(V019, [setup], "vllm019_sha256_cbor", Parity())
