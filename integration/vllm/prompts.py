"""A prompt that ends earlier, in the engine that is to leave its end to another one."""

from typing import Any, Final

_PER_TOKEN: Final = ("prompt_token_ids", "prompt_embeds", "prompt_is_token_ids")
"""Attributes of vLLM's `Request` that have an entry for each token of the prompt, or
are None (the last is of 0.32)."""


def shorten_prompt(request: Any, count: int, hash_block_size: int) -> None:
    """Leave tokens away at the end of a request's prompt, and answer with one token.

    As vLLM 0.32's `NixlConnector._truncate_request_for_prefill` does, which leaves the
    hash of a block that is not full any more: it would be given to whatever fills that
    block.

    Args:
        request: vLLM's; nothing of it has been computed.
        count: tokens to leave away. Nothing happens where none would be left, or where
            an image or the like reaches into them.
        hash_block_size: tokens that one of its block hashes covers.
    """
    left = request.num_prompt_tokens - count
    if count < 1 or left < 1 or _reaches_beyond(request, left):
        return
    for name in _PER_TOKEN:
        values = getattr(request, name, None)
        if values is not None:
            # A copy: samples of one prompt share the list.
            setattr(request, name, values[:left])
    del request._all_token_ids[left:]
    del request.block_hashes[left // hash_block_size :]
    request.num_prompt_tokens = left
    request.max_tokens = 1


def _reaches_beyond(request: Any, length: int) -> bool:
    places = (feature.mm_position for feature in request.mm_features or ())
    return any(place.offset + place.length > length for place in places)
