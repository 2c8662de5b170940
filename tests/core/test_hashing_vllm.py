"""Byte for byte the hashes of vLLM 0.19.1 and 0.32 for `sha256_cbor`."""

import random
from functools import cache
from typing import Any

import numpy as np
import pytest

from kvplugin.errors import ConfigError
from kvplugin.hashing import coarse_hashes, get_hash_format
from kvplugin.request import Adapter, MediaItem, MediaRange, Request
from tests.oracles import V019, V032, ask

FORMATS = {V019: "vllm019_sha256_cbor", V032: "vllm032_sha256_cbor"}
VERSIONS = pytest.mark.parametrize("version", FORMATS)
CASES = 400


SIZES = [(16, 16), (16, 32), (8, 40)]


@cache
def questions() -> tuple[list[dict[str, Any]], list[bytes]]:
    """Requests to hash, and hashes to read as those of longer blocks."""
    rng = random.Random(7)
    cases = [random_case(rng) for _ in range(CASES)]
    return cases, [rng.randbytes(32) for _ in range(23)]


@cache
def answers(version: str) -> tuple[list[list[bytes]], list[list[bytes]]]:
    """vLLM's answers; asked once, because its start costs seconds."""
    cases, hashes = questions()
    request = {"seed": "a seed", "cases": cases, "hashes": hashes, "sizes": SIZES}
    hashed, coarse = ask(version, "hashes", request)
    return hashed, coarse


@VERSIONS
def test_hashes_are_those_of_vllm(version: str) -> None:
    for case, answer in zip(questions()[0], answers(version)[0], strict=True):
        assert hashes_of(case, version, "a seed") == answer, case


@VERSIONS
def test_coarse_hashes_are_those_of_vllm(version: str) -> None:
    rule = get_hash_format(FORMATS[version], seed="0").coarse_rule
    hashes = questions()[1]
    ours = [list(coarse_hashes(hashes, *pair, rule)) for pair in SIZES]
    assert ours == answers(version)[1]


def test_default_seed_is_that_of_032() -> None:
    case = random_case(random.Random(0)) | {"tokens": [1] * 64, "embeds": None}
    case["media"] = []
    request = {"seed": None, "cases": [case], "hashes": [], "sizes": []}
    (answer,), _ = ask(V032, "hashes", request)
    assert hashes_of(case, V032, None) == answer


def test_019_needs_a_seed() -> None:
    with pytest.raises(ConfigError, match="needs a seed: the value of PYTHONHASHSEED"):
        get_hash_format(FORMATS[V019])


@pytest.mark.parametrize(("version", "rule"), [(V019, "concat"), (V032, "last")])
def test_coarse_rule_is_that_of_the_version(version: str, rule: str) -> None:
    assert get_hash_format(FORMATS[version], seed="0").coarse_rule == rule


def hashes_of(case: dict[str, Any], version: str, seed: str | None) -> list[bytes]:
    lora, embeds = case["lora"], case["embeds"]
    request = Request(
        "r",
        case["tokens"],
        hash_format=get_hash_format(FORMATS[version], seed=seed),
        hash_block_size=case["block_size"],
        lora_request=lora and Adapter(*lora),
        cache_salt=case["salt"],
        mm_features=[MediaItem(i, MediaRange(o, n)) for i, o, n in case["media"]],
        prompt_embeds=None if embeds is None else np.array(embeds, np.float32),
    )
    for tokens in case["appends"]:
        request.append_output_token_ids(tokens)
    return request.block_hashes


def random_case(rng: random.Random) -> dict[str, Any]:
    """A request of any kind and the tokens that it generates, step by step."""
    length = rng.randint(1, 70)
    embeds = None
    if rng.random() < 0.3:
        embeds = [[rng.random(), rng.random()] for _ in range(length)]
    return {
        "block_size": rng.choice([1, 4, 16]),
        "tokens": None if embeds else [rng.randrange(200_000) for _ in range(length)],
        "embeds": embeds,
        "lora": rng.choice([None, ("x", "/x"), ("y", "/x")]),
        "salt": rng.choice([None, "", "x", "salt"]),
        "media": random_media(rng, length) if rng.random() < 0.5 else [],
        "appends": [
            [rng.randrange(200_000) for _ in range(rng.randint(1, 9))]
            for _ in range(rng.randint(0, 8))
        ],
    }


def random_media(rng: random.Random, length: int) -> list[tuple[str, int, int]]:
    edges = sorted(rng.sample(range(length + 1), min(length + 1, rng.randint(0, 9))))
    ends = zip(edges[::2], edges[1::2], strict=False)
    return [(rng.choice("abc"), begin, end - begin) for begin, end in ends]
