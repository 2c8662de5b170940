"""After any acceptance, tokens that count have their slots and the rejected none."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplugin.kernels.dispatch import slot_mappings
from kvplugin.worker.drafts import (
    draft_tokens,
    group_queries,
    next_drafts,
    num_rejected_tokens,
    pad_queries,
    ungroup_queries,
    unpad_queries,
)
from tests.worker import naive
from tests.worker.naive import table_of

MAX_LEN, BLOCK = 32, 4


@dataclass(frozen=True)
class Verified:
    """One request in a step that was verified."""

    computed: int
    tokens: int
    drafts: int
    accepted: int

    @property
    def rejected(self) -> int:
        return self.drafts - self.accepted


@st.composite
def verified(draw: st.DrawFn) -> Verified:
    tokens = draw(st.integers(1, 6))
    drafts = draw(st.integers(0, tokens - 1))
    computed = draw(st.integers(0, MAX_LEN - tokens))
    return Verified(computed, tokens, drafts, draw(st.integers(0, drafts)))


def starts_of(lengths: Sequence[int]) -> torch.Tensor:
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0)
    return ends.to(torch.int32)


def int32(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@settings(max_examples=150, deadline=None)
@given(st.lists(verified(), min_size=1, max_size=5), st.integers(0, 4))
def test_drafters_write_what_counts(step: list[Verified], num_new: int) -> None:
    tables = table_of(BLOCK, MAX_LEN, ratio=2, max_num_reqs=len(step))
    width = MAX_LEN // BLOCK
    ids = [list(range(1 + i * width, 1 + (i + 1) * width)) for i in range(len(step))]
    for row, blocks in enumerate(ids):
        tables.append(row, [blocks])
    tables.commit(len(step))
    num_rejected = num_rejected_tokens(
        int32([v.drafts for v in step]), int32([v.accepted + 1 for v in step])
    )
    tokens = draft_tokens(
        starts_of([v.tokens for v in step]),
        int32([v.computed for v in step]),
        num_rejected,
        sum(v.tokens for v in step),
        num_new,
    )
    slots = torch.empty(1, len(tokens.rows), dtype=torch.int64)
    slot_mappings(tables.slot_tables(), tokens.rows, tokens.positions, slots)

    expected, rejected, last = [], [], []
    for request, blocks in zip(step, ids, strict=True):
        after = request.computed + request.tokens - request.rejected + num_new
        positions = range(request.computed, after)
        expected += [
            naive.slot(blocks, at, BLOCK) if at < MAX_LEN else -1 for at in positions
        ]
        last.append(len(expected) - 1)
        expected += [-1] * request.rejected
        rejected += [False] * len(positions) + [True] * request.rejected
    assert slots[0].tolist() == expected
    assert tokens.is_rejected.tolist() == rejected
    assert tokens.last.tolist() == last
    lengths = [v.tokens + num_new for v in step]
    assert tokens.query_start_loc.tolist() == starts_of(lengths).tolist()
    at = 0
    for request, length in zip(step, lengths, strict=True):
        positions = tokens.positions[at : at + length].tolist()
        assert positions == list(range(request.computed, request.computed + length))
        at += length
    kinds = (tokens.rows, tokens.positions, tokens.query_start_loc, tokens.last)
    assert [t.dtype for t in kinds] == [
        torch.int32,
        torch.int64,
        torch.int32,
        torch.int64,
    ]


def test_requests_without_drafts_reject_nothing() -> None:
    drafts, sampled = int32([0, 0, 3, 3, 2]), int32([1, 0, 1, 4, 2])
    assert num_rejected_tokens(drafts, sampled).tolist() == [0, 0, 3, 0, 1]


def test_the_next_draft_stops_at_the_longest_length() -> None:
    step = next_drafts(torch.tensor([3, 30, 31, 0]), int32([4, 31, 32, 1]), 32)
    assert step.rows.tolist() == [0, 1, -1, 3]
    assert step.positions.tolist() == [4, 31, 0, 1]
    assert step.seq_lens.tolist() == [5, 32, 1, 2]
    assert (step.rows.dtype, step.seq_lens.dtype) == (torch.int32, torch.int32)


def queries(tokens: int, heads: int = 2, dim: int = 3) -> torch.Tensor:
    """Element (token, head, dim) tells which it is."""
    return torch.arange(tokens * heads * dim).view(tokens, heads, dim)


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 4))
def test_queries_by_request_and_back(requests: int, tokens: int) -> None:
    query = queries(requests * tokens)
    grouped = group_queries(query, [tokens] * requests)
    assert grouped.shape == (requests, tokens, 2, 3)
    assert grouped.data_ptr() == query.data_ptr()
    for request in range(requests):
        for token in range(tokens):
            assert torch.equal(grouped[request, token], query[request * tokens + token])
    assert torch.equal(ungroup_queries(grouped), query)


def test_no_requests() -> None:
    assert group_queries(queries(0), []).shape == (0, 0, 2, 3)
    assert pad_queries(queries(0), starts_of([]), 0).shape == (0, 0, 2, 3)


def test_ragged_queries_are_refused() -> None:
    with pytest.raises(ValueError, match=r"have 1 to 3 tokens.*pad_queries"):
        group_queries(queries(6), [3, 1, 2])
    with pytest.raises(ValueError, match="6 queries for 2 requests of 2 tokens"):
        group_queries(queries(6), [2, 2])


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.integers(0, 2))
def test_ragged_queries_are_padded_in_front(lengths: list[int], room: int) -> None:
    most = max(lengths) + room
    query, starts = queries(sum(lengths)) + 1, starts_of(lengths)
    padded = pad_queries(query, starts, most)
    assert padded.shape == (len(lengths), most, 2, 3)
    for request, length in enumerate(lengths):
        first = int(starts[request])
        mine = query[first : first + length]
        assert torch.equal(padded[request, most - length :], mine)
        assert not padded[request, : most - length].any()
    assert torch.equal(unpad_queries(padded, starts, sum(lengths)), query)
