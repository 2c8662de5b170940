"""A hash stands for a block and all before it; a key for a hash in one group."""

import os
import struct
import subprocess
import sys
from hashlib import sha256

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplugin.errors import ConfigError
from kvplugin.hashing import (
    HASH_FORMATS,
    ChainedFormat,
    RequestIdentity,
    get_hash_format,
    make_key,
    split_key,
)
from kvplugin.hashing.own import kv_sha256, xxh3_128
from kvplugin.request import Adapter, MediaItem, MediaRange, Request

TOKENS = st.integers(0, 2**32 - 1)
SEQUENCES = st.lists(TOKENS, max_size=40)
BLOCK_SIZES = st.integers(1, 9)
HASHES = st.binary(min_size=1, max_size=64)
GROUPS = st.integers(0, 2**32 - 1)
SHA = kv_sha256()
OWN = (SHA, xxh3_128())


def hashes_of(
    tokens: list[int], block_size: int, chain: ChainedFormat = SHA
) -> list[bytes]:
    hashes: list[bytes] = []
    chain.extend_tokens(hashes, tokens, block_size, chain.root(block_size=block_size))
    return hashes


# -- hashes ------------------------------------------------------------------------


@given(SEQUENCES, BLOCK_SIZES)
def test_hash_covers_its_parent_and_its_tokens_as_little_endian_words(
    tokens: list[int], block_size: int
) -> None:
    parent, expected = SHA.root(block_size=block_size), []
    for start in range(0, len(tokens) // block_size * block_size, block_size):
        words = struct.pack(f"<{block_size}I", *tokens[start : start + block_size])
        parent = sha256(parent + words).digest()
        expected.append(parent)
    assert hashes_of(tokens, block_size) == expected


@pytest.mark.parametrize("chain", OWN, ids=lambda chain: chain.name)
@given(SEQUENCES, BLOCK_SIZES, st.data())
def test_hashes_of_a_growing_sequence_are_those_of_the_whole(
    chain: ChainedFormat, tokens: list[int], block_size: int, data: st.DataObject
) -> None:
    hashes: list[bytes] = []
    root = chain.root(block_size=block_size)
    end = 0
    while end < len(tokens):
        end = data.draw(st.integers(end + 1, len(tokens)))
        chain.extend_tokens(hashes, tokens[:end], block_size, root)
    assert hashes == hashes_of(tokens, block_size, chain)


@pytest.mark.parametrize("chain", OWN, ids=lambda chain: chain.name)
@given(SEQUENCES.filter(bool), BLOCK_SIZES, st.data())
def test_changed_token_changes_its_block_and_all_after_it(
    chain: ChainedFormat, tokens: list[int], block_size: int, data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(tokens) - 1))
    changed = tokens.copy()
    changed[place] ^= 1
    before = hashes_of(tokens, block_size, chain)
    after = hashes_of(changed, block_size, chain)
    same = place // block_size
    assert before[:same] == after[:same]
    assert not set(before[same:]) & set(after[same:])


def test_only_full_blocks_have_a_hash() -> None:
    assert [len(hashes_of([7] * n, 4)) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


@pytest.mark.parametrize("token", [-1, 2**32])
def test_token_beyond_32_bits_is_an_error_and_changes_nothing(token: int) -> None:
    hashes = hashes_of([1], 1)
    with pytest.raises(OverflowError):
        SHA.extend_tokens(hashes, [1, 2, token], 1, SHA.root(block_size=1))
    assert hashes == hashes_of([1], 1)


def test_hashes_for_different_block_sizes_have_nothing_in_common() -> None:
    assert not set(hashes_of([0] * 16, 4)) & set(hashes_of([0] * 16, 8))


def test_root_is_the_same_for_ever() -> None:
    # Whoever changes it makes all that tiers below memory hold unreachable.
    fields = [
        ["format", "kv_sha256/1", 16],
        ["weights", 3],
        ["adapter", ["x", "/x", 2]],
        ["salt", None],
    ]
    found = SHA.root(RequestIdentity(("x", "/x", 2), None, 3), 16)
    assert found == sha256(msgpack.packb(fields)).digest()


PROGRAM = """
from kvplugin.hashing import get_hash_format
from tests.core.test_hashing import everything
print(everything(get_hash_format({name!r})))
"""


def everything(hash_format: object) -> str:
    """Hashes of a request that has each kind of identity but embeddings."""
    request = Request(
        "r",
        range(64),
        hash_format=hash_format,  # type: ignore[arg-type]
        lora_request=Adapter("x", "/x", 1),
        cache_salt="y",
        mm_features=[MediaItem("z", MediaRange(20, 20))],
        weight_epoch=1,
    )
    return b"".join(request.block_hashes).hex()


@pytest.mark.parametrize("name", ["kv_sha256", "xxh3_128"])
def test_hashes_depend_on_no_process(name: str) -> None:
    here = everything(get_hash_format(name))
    for seed in ("1", "2", "random"):
        there = subprocess.run(
            [sys.executable, "-c", PROGRAM.format(name=name)],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        )
        assert there.stdout.strip() == here


# -- names -------------------------------------------------------------------------


@pytest.mark.parametrize("name", HASH_FORMATS)
def test_format_is_what_its_name_says(name: str) -> None:
    seed = "1" if name.startswith("vllm") else None
    hash_format = get_hash_format(name, seed=seed)
    assert hash_format.name == name
    request = Request("r", range(16), hash_format=hash_format)
    assert [len(h) for h in request.block_hashes] == [hash_format.digest_size]
    assert hash_format.needs_token_check == (name == "xxh3_128")


def test_default_is_kv_sha256() -> None:
    assert get_hash_format().name == "kv_sha256"


def test_unknown_name_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'kv_sha256'"):
        get_hash_format("kvsha256")


@pytest.mark.parametrize("name", ["kv_sha256", "xxh3_128"])
def test_own_formats_take_no_seed(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name!r} takes no seed"):
        get_hash_format(name, seed="0")


@pytest.mark.parametrize(
    ("name", "package"), [("xxh3_128", "xxhash"), ("vllm032_sha256_cbor", "cbor2")]
)
def test_missing_package_is_an_error_that_names_the_extra(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"{package}.*kvplugin\[hash\]"):
        get_hash_format(name)


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
