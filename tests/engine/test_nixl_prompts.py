"""A prompt whose end is left to another engine, on vLLM's own `Request`."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvplugin.integration.vllm.prompts import shorten_prompt

BLOCK = 16


@pytest.fixture(autouse=True)
def one_seed() -> None:
    """0.19 draws the hash before the first block at random."""
    init_none_hash(sha256)


def request(prompt: list[int], **attributes: Any) -> Request:
    made = Request(
        request_id="a",
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(max_tokens=9),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize("length", [2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 40])
def test_it_is_as_if_the_client_had_sent_the_shorter_prompt(length):
    whole = list(range(length))
    shortened, short = request(whole), request(whole[:-1])
    shorten_prompt(shortened, 1, BLOCK)
    assert shortened.prompt_token_ids == short.prompt_token_ids
    assert list(shortened.all_token_ids) == list(short.all_token_ids)
    assert shortened.num_prompt_tokens == short.num_prompt_tokens
    assert shortened.num_tokens == short.num_tokens
    assert shortened.block_hashes == short.block_hashes
    assert shortened.max_tokens == 1


def test_a_block_that_is_filled_by_other_tokens_has_their_hash():
    """What vLLM's own connector leaves: the hash of the prompt that was."""
    shortened, short = request([*range(BLOCK)]), request([*range(BLOCK - 1)])
    shorten_prompt(shortened, 1, BLOCK)
    for one in (shortened, short):
        one.append_output_token_ids(99)
    assert shortened.block_hashes == short.block_hashes
    assert len(shortened.block_hashes) == 1


def test_the_prompt_of_other_samples_is_not_touched():
    prompt = [*range(20)]
    samples = [request(prompt), request(prompt)]
    for sample in samples:
        shorten_prompt(sample, 1, BLOCK)
    assert [sample.num_prompt_tokens for sample in samples] == [19, 19]
    assert [len(sample.prompt_token_ids or ()) for sample in samples] == [19, 19]
    assert prompt == [*range(20)]


def test_a_prompt_of_embeddings_is_shortened():
    made = request([*range(20)])
    made.prompt_token_ids, made.prompt_embeds = None, torch.zeros(20, 4)
    shorten_prompt(made, 1, BLOCK)
    assert made.prompt_embeds.shape == (19, 4)
    assert made.num_prompt_tokens == made.num_tokens == 19


@pytest.mark.parametrize("count", [0, 20, 21])
def test_nothing_happens_where_nothing_or_everything_would_go(count):
    made = request([*range(20)])
    shorten_prompt(made, count, BLOCK)
    assert made.num_prompt_tokens == 20
    assert made.max_tokens == 9


def test_an_image_at_the_end_is_not_cut():
    def feature(length: int) -> Any:
        return SimpleNamespace(mm_position=SimpleNamespace(offset=10, length=length))

    cut, whole = request([*range(20)]), request([*range(20)])
    cut.mm_features, whole.mm_features = [feature(9)], [feature(10)]
    shorten_prompt(cut, 1, BLOCK)
    shorten_prompt(whole, 1, BLOCK)
    assert (cut.num_prompt_tokens, whole.num_prompt_tokens) == (19, 20)
