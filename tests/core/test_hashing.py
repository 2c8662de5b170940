"""A hash stands for a block and all before it; a key for a hash in one group."""

import os
import struct
import subprocess
import sys
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplugin.hashing import extend_hashes, make_key, root_hash, split_key

TOKENS = st.integers(0, 2**32 - 1)
SEQUENCES = st.lists(TOKENS, max_size=40)
BLOCK_SIZES = st.integers(1, 9)
HASHES = st.binary(min_size=1, max_size=64)
GROUPS = st.integers(0, 2**32 - 1)
ROOT = root_hash()


def hashes_of(tokens: list[int], block_size: int, root: bytes = ROOT) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, tokens, block_size, root)
    return hashes


# -- hashes ------------------------------------------------------------------------


@given(SEQUENCES, BLOCK_SIZES)
def test_hash_covers_its_parent_and_its_tokens_as_little_endian_words(
    tokens: list[int], block_size: int
) -> None:
    parent, expected = ROOT, []
    for start in range(0, len(tokens) // block_size * block_size, block_size):
        words = struct.pack(f"<{block_size}I", *tokens[start : start + block_size])
        parent = sha256(parent + words).digest()
        expected.append(parent)
    assert hashes_of(tokens, block_size) == expected


@given(SEQUENCES, BLOCK_SIZES, st.data())
def test_hashes_of_a_growing_request_are_those_of_the_whole(
    tokens: list[int], block_size: int, data: st.DataObject
) -> None:
    hashes: list[bytes] = []
    end = 0
    while end < len(tokens):
        end = data.draw(st.integers(end + 1, len(tokens)))
        extend_hashes(hashes, tokens[:end], block_size, ROOT)
    assert hashes == hashes_of(tokens, block_size)


@given(SEQUENCES.filter(bool), BLOCK_SIZES, st.data())
def test_changed_token_changes_its_block_and_all_after_it(
    tokens: list[int], block_size: int, data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(tokens) - 1))
    changed = tokens.copy()
    changed[place] ^= 1
    before, after = hashes_of(tokens, block_size), hashes_of(changed, block_size)
    same = place // block_size
    assert before[:same] == after[:same]
    assert not set(before[same:]) & set(after[same:])


def test_only_full_blocks_have_a_hash() -> None:
    assert [len(hashes_of([7] * n, 4)) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


@pytest.mark.parametrize("token", [-1, 2**32])
def test_token_beyond_32_bits_is_an_error(token: int) -> None:
    with pytest.raises(OverflowError):
        hashes_of([token], 1)


# -- who may share -----------------------------------------------------------------


def test_requests_share_only_with_the_same_adapter_and_salt() -> None:
    names = [None, "", "x", "y"]
    roots = {root_hash(adapter=a, salt=s) for a in names for s in names}
    assert len(roots) == len(names) ** 2


def test_adapter_and_salt_of_one_name_differ() -> None:
    tokens = [1, 2, 3, 4]
    by_adapter = hashes_of(tokens, 2, root_hash(adapter="x"))
    by_salt = hashes_of(tokens, 2, root_hash(salt="x"))
    assert not set(by_adapter) & set(by_salt)


def test_root_hash_is_the_same_for_ever() -> None:
    # Whoever changes it makes all that tiers below memory hold unreachable.
    fields = b"\x83\xa6format\xabkv_sha256/1\xa7adapter\xa1x\xa4salt\xc0"  # MessagePack
    assert root_hash(adapter="x") == sha256(fields).digest()


def test_hashes_depend_on_no_process() -> None:
    program = (
        "from kvplugin.hashing import *; hashes = []\n"
        "extend_hashes(hashes, range(64), 16, root_hash(adapter='x', salt='y'))\n"
        "print(b''.join(hashes).hex())"
    )
    here = hashes_of(list(range(64)), 16, root_hash(adapter="x", salt="y"))
    for seed in ("1", "2"):
        there = subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        )
        assert there.stdout.strip() == b"".join(here).hex()


# -- keys --------------------------------------------------------------------------


@given(HASHES, GROUPS)
def test_key_comes_apart_into_what_it_was_made_of(
    block_hash: bytes, group: int
) -> None:
    assert split_key(make_key(block_hash, group)) == (block_hash, group)


def test_key_is_the_one_that_vllm_makes() -> None:
    vllm = pytest.importorskip("vllm.v1.core.kv_cache_utils")

    @given(HASHES, GROUPS)
    def check(block_hash: bytes, group: int) -> None:
        key = make_key(block_hash, group)
        assert key == vllm.make_block_hash_with_group_id(block_hash, group)
        assert split_key(key) == (vllm.get_block_hash(key), vllm.get_group_id(key))

    check()


@pytest.mark.parametrize("group", [-1, 2**32])
def test_group_beyond_32_bits_is_an_error(group: int) -> None:
    with pytest.raises(OverflowError):
        make_key(b"hash", group)
