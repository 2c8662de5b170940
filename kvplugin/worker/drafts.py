"""Speculative decoding on the worker: drafters' tokens, and queries by request.

After the target has verified drafts, some of its tokens are rejected. A drafter runs
over the same tokens, at the same positions, and must leave no KV of those: they get no
row, so that `slot_mappings` gives them no slot. (The target has written their KV; it
is overwritten by the tokens that come in their place, and not read before.)

Everything here is torch on the batch's device, with sizes that the host knows: nothing
waits for the device.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvplugin.kernels.host_slots import NO_ROW


def num_rejected_tokens(
    num_drafts: torch.Tensor, num_sampled: torch.Tensor
) -> torch.Tensor:
    """Drafts of each request that were not accepted, [requests].

    Args:
        num_drafts: drafts that were verified, [requests].
        num_sampled: tokens that came of it, accepted drafts and one more, [requests];
            anything for requests without drafts.
    """
    return torch.where(num_drafts > 0, num_drafts + 1 - num_sampled, 0)


class DraftTokens(NamedTuple):
    """The tokens of a drafter's first pass. Each request has, in this order,

        the target's tokens less the rejected | new drafts | as many as were rejected

    so that positions go up and the last part can be cut off; that part has `NO_ROW`.
    """

    rows: torch.Tensor
    """int32 [tokens], for `slot_mappings`."""
    positions: torch.Tensor
    """int64 [tokens], ascending by one in each request. Those of the last part, and
    all from `max_model_len` on, are beyond what the model may see: clamp them for it,
    but not for `slot_mappings`."""
    query_start_loc: torch.Tensor
    """int32 [requests + 1]."""
    is_rejected: torch.Tensor
    """bool [tokens]: the last part."""
    last: torch.Tensor
    """The last token of each request that is not rejected: int64 [requests]."""


def draft_tokens(
    query_start_loc: torch.Tensor,
    num_computed: torch.Tensor,
    num_rejected: torch.Tensor,
    num_tokens: int,
    num_new: int = 0,
) -> DraftTokens:
    """The tokens of a verified step again, for a drafter.

    Args:
        query_start_loc: of the step that was verified, int32 [requests + 1].
        num_computed: tokens of each request before it, [requests].
        num_rejected: of each request's tokens the last that do not count, [requests];
            fewer than it has.
        num_tokens: tokens of that step.
        num_new: drafts that the pass computes beside them, for each request.
    """
    requests, device = len(num_computed), query_start_loc.device
    index = torch.arange(requests + 1, dtype=torch.int32, device=device)
    starts = query_start_loc + num_new * index
    lengths = starts.diff()
    total = num_tokens + requests * num_new
    rows = index[:-1].repeat_interleave(lengths, output_size=total)
    place = torch.arange(total, device=device) - starts[:-1][rows]
    live = lengths - num_rejected
    is_rejected = place >= live[rows]
    return DraftTokens(
        rows=torch.where(is_rejected, NO_ROW, rows),
        positions=num_computed[rows] + place,
        query_start_loc=starts,
        is_rejected=is_rejected,
        last=starts[:-1].to(torch.int64) + live - 1,
    )


class NextDrafts(NamedTuple):
    """One more token for each request, of an autoregressive drafter."""

    rows: torch.Tensor
    """int32 [requests], `NO_ROW` where the request may not grow."""
    positions: torch.Tensor
    """int64 [requests], 0 there."""
    seq_lens: torch.Tensor
    """int32 [requests], 1 there."""


def next_drafts(
    positions: torch.Tensor, seq_lens: torch.Tensor, max_model_len: int
) -> NextDrafts:
    """The token after the last one of each request.

    A request that has reached `max_model_len` goes through the model with a harmless
    token, which writes no KV and whose draft nobody uses.

    Args:
        positions: of the last tokens, int64 [requests].
        seq_lens: with these tokens, int32 [requests].
        max_model_len: tokens of the longest request.
    """
    fits = positions + 1 < max_model_len
    index = torch.arange(len(positions), dtype=torch.int32, device=positions.device)
    return NextDrafts(
        rows=torch.where(fits, index, NO_ROW),
        positions=torch.where(fits, positions + 1, 0),
        seq_lens=torch.where(fits, seq_lens + 1, 1),
    )


def group_queries(query: torch.Tensor, query_lens: Sequence[int]) -> torch.Tensor:
    """Queries by request, for kernels that verify several tokens a request at once.

    Args:
        query: [tokens, heads, dim], request after request.
        query_lens: tokens of each request.

    Returns:
        A view [requests, tokens of each, heads, dim].

    Raises:
        ValueError: requests have different numbers of tokens, or together not those
            of `query`.
    """
    most = max(query_lens, default=0)
    if any(length != most for length in query_lens):
        raise ValueError(
            f"requests have {min(query_lens)} to {most} tokens, so that their queries "
            "are no tensor of [requests, tokens]: use pad_queries, or split the batch"
        )
    if len(query) != most * len(query_lens):
        raise ValueError(
            f"{len(query)} queries for {len(query_lens)} requests of {most} tokens"
        )
    return query.view(len(query_lens), most, *query.shape[1:])


def ungroup_queries(grouped: torch.Tensor) -> torch.Tensor:
    """[requests, tokens, heads, dim] as [requests * tokens, heads, dim], a view where
    strides allow; undoes `group_queries`."""
    return grouped.flatten(0, 1)


def pad_queries(
    query: torch.Tensor, query_start_loc: torch.Tensor, max_query_len: int
) -> torch.Tensor:
    """Queries by request where requests have different numbers of tokens.

    Padding comes before a request's tokens, so that its last one is last: kernels that
    mask causally count from there.

    Args:
        query: [tokens, heads, dim], request after request.
        query_start_loc: int32 [requests + 1], ending with the number of tokens.
        max_query_len: most tokens of a request.

    Returns:
        [requests, max_query_len, heads, dim], zero where there is no token.
    """
    requests = len(query_start_loc) - 1
    places = _padded_places(query_start_loc, max_query_len, len(query))
    padded = query.new_zeros(requests * max_query_len, *query.shape[1:])
    padded[places] = query
    return padded.view(requests, max_query_len, *query.shape[1:])


def unpad_queries(
    padded: torch.Tensor, query_start_loc: torch.Tensor, num_tokens: int
) -> torch.Tensor:
    """The output [tokens, heads, dim] of a kernel that was given `pad_queries`.

    Args:
        padded: [requests, max_query_len, heads, dim].
        query_start_loc: int32 [requests + 1], ending with `num_tokens`.
        num_tokens: of all requests.
    """
    places = _padded_places(query_start_loc, padded.shape[1], num_tokens)
    return padded.flatten(0, 1)[places]


def _padded_places(
    query_start_loc: torch.Tensor, max_query_len: int, num_tokens: int
) -> torch.Tensor:
    """Where each token stands in [requests * max_query_len], int64 [tokens]."""
    ends = query_start_loc[1:].to(torch.int64)
    requests = torch.arange(1, len(ends) + 1, device=ends.device)
    shift = requests * max_query_len - ends
    tokens = torch.arange(num_tokens, device=ends.device)
    lengths = query_start_loc.diff()
    return tokens + shift.repeat_interleave(lengths, output_size=num_tokens)
