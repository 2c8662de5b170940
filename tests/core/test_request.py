"""The plain request: it owns its tokens and keeps their hashes up to date."""

from typing import Any

import numpy as np
import pytest

from kvplugin.errors import KVPluginError
from kvplugin.hashing import HashedRequest, get_hash_format
from kvplugin.request import (
    MediaItem,
    MediaRange,
    Request,
    RequestError,
    RequestLike,
)

SHA = get_hash_format()


def item(name: str, offset: int, length: int) -> MediaItem:
    return MediaItem(name, MediaRange(offset, length))


def test_new_request_has_computed_nothing() -> None:
    request: RequestLike = Request("r", [1, 2, 3])
    assert (request.request_id, request.num_tokens, request.num_prompt_tokens) == (
        "r",
        3,
        3,
    )
    assert (request.num_computed_tokens, request.num_preemptions) == (0, 0)
    assert request.skip_reading_prefix_cache is None
    assert (request.priority, request.arrival_time) == (0, 0.0)
    assert repr(request) == "Request('r', num_tokens=3, num_computed_tokens=0)"


def test_tokens_are_its_own() -> None:
    prompt = [1, 2, 3]
    request = Request("r", prompt)
    prompt.append(4)
    assert list(request.all_token_ids) == [1, 2, 3]


def test_appended_tokens_are_output() -> None:
    request = Request("r", [1, 2, 3])
    request.append_output_token_ids(4)
    request.append_output_token_ids([])
    request.append_output_token_ids(iter([5, 6]))
    assert list(request.all_token_ids) == [1, 2, 3, 4, 5, 6]
    assert request.output_token_ids == [4, 5, 6]
    assert (request.num_prompt_tokens, request.num_output_tokens) == (3, 3)


def test_hashes_follow_the_tokens_block_by_block() -> None:
    request = Request("r", [0] * 3, hash_format=SHA, hash_block_size=4)
    counts = []
    for token in range(6):
        counts.append(len(request.block_hashes))
        request.append_output_token_ids(token)
    assert counts == [0, 1, 1, 1, 1, 2]
    request.append_output_token_ids([0] * 10)
    assert len(request.block_hashes) == 4


def test_format_is_asked_only_when_a_block_is_full() -> None:
    class Counting:
        calls = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(SHA, name)

        def extend(
            self, hashes: list[bytes], request: HashedRequest, block_size: int
        ) -> None:
            self.calls += 1
            SHA.extend(hashes, request, block_size)

    counting: Any = Counting()
    request = Request("r", [0], hash_format=counting, hash_block_size=8)
    for token in range(23):
        request.append_output_token_ids(token)
    assert (counting.calls, len(request.block_hashes)) == (1 + 3, 3)


def test_without_a_format_there_are_no_hashes() -> None:
    request = Request("r", [0] * 64)
    request.append_output_token_ids([0] * 64)
    assert request.block_hashes == []


def test_embeddings_alone_are_a_prompt_of_zeros() -> None:
    request = Request("r", prompt_embeds=np.ones((5, 2)))
    assert list(request.all_token_ids) == [0] * 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "empty prompt"),
        ({"prompt_token_ids": []}, "empty prompt"),
        ({"prompt_embeds": np.ones((0, 2))}, "empty prompt"),
        ({"prompt_token_ids": [1, -1]}, "token id -1 is outside 0 to 4294967295"),
        ({"prompt_token_ids": [2**32]}, "token id 4294967296 is outside"),
        (
            {"prompt_token_ids": [1], "prompt_embeds": np.ones((2, 2))},
            "2 rows of prompt_embeds for 1 prompt tokens",
        ),
        ({"prompt_token_ids": [1], "hash_block_size": 0}, "hash_block_size is 0"),
    ],
)
def test_impossible_request_is_an_error(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=f"request 'r'.*{message}") as caught:
        Request("r", **arguments)
    assert isinstance(caught.value, (KVPluginError, ValueError))


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([item("a", -1, 2)], "'a' covers tokens -1 to 1 of a prompt of 8"),
        ([item("a", 0, 0)], "'a' covers tokens 0 to 0"),
        ([item("a", 7, 2)], "'a' covers tokens 7 to 9"),
        ([item("a", 0, 4), item("b", 3, 2)], "'b' begins at token 3, before 'a' ends"),
        ([item("a", 4, 2), item("b", 0, 2)], "'b' begins at token 0, before 'a' ends"),
    ],
)
def test_media_that_can_not_be_are_an_error(
    items: list[MediaItem], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        Request("r", range(8), mm_features=items)


def test_media_may_touch_each_other_and_the_end() -> None:
    items = (item("a", 0, 4), item("a", 4, 4))
    assert Request("r", range(8), mm_features=items).mm_features == items


@pytest.mark.parametrize("tokens", [-1, 2**32, [1, -1], [2**32, 1]])
def test_impossible_output_is_an_error_and_changes_nothing(
    tokens: int | list[int],
) -> None:
    request = Request("r", [0] * 3, hash_format=SHA, hash_block_size=4)
    with pytest.raises(RequestError, match=r"token id (-1|4294967296) is outside"):
        request.append_output_token_ids(tokens)
    assert (request.num_tokens, request.block_hashes) == (3, [])


@pytest.mark.parametrize("length", [2, 8, 9, 10])
def test_the_end_of_a_prompt_is_left_away(length: int) -> None:
    request = Request(
        "r", range(length), hash_format=get_hash_format(), hash_block_size=4
    )
    shorter = Request(
        "r", range(length - 1), hash_format=get_hash_format(), hash_block_size=4
    )
    request.leave_away(1)
    for it in (request, shorter):
        it.append_output_token_ids(range(50, 59))
    assert list(request.all_token_ids) == list(shorter.all_token_ids)
    assert request.num_prompt_tokens == length - 1
    assert request.block_hashes == shorter.block_hashes


def test_media_and_embeddings_at_the_end_are_left_away_too() -> None:
    items = [MediaItem("a", MediaRange(0, 3)), MediaItem("b", MediaRange(4, 1))]
    request = Request(
        "r", None, prompt_embeds=[[1.0]] * 5, mm_features=items, hash_format=None
    )
    request.leave_away(1)
    assert len(request.prompt_embeds) == request.num_tokens == 4
    assert request.mm_features == tuple(items[:1])


@pytest.mark.parametrize("num_tokens", [-1, 3, 4])
def test_what_cannot_be_left_away(num_tokens: int) -> None:
    request = Request("r", range(3))
    with pytest.raises(RequestError, match="left away"):
        request.leave_away(num_tokens)
    request.append_output_token_ids(5)
    with pytest.raises(RequestError, match="left away"):
        request.leave_away(1)
    assert request.num_tokens == 4
