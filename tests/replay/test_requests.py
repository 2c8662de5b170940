"""How a trace's ids become the blocks of requests."""

import pytest

from kvplugin.errors import ConfigError
from kvplugin.replay import Trace, TraceEntry
from kvplugin.replay.requests import TraceRequest, make_requests
from kvplugin.request import RequestLike


def one_entry(tokens: int, ids: int, *, full: bool = False, answer: int = 0) -> Trace:
    entry = TraceEntry(0.0, tokens, answer, tuple(range(ids)))
    return Trace("t", "mooncake", 512, (entry,), full)


@pytest.mark.parametrize(
    ("tokens", "block_size", "counted", "dropped"),
    [
        (512, 512, 1, 1),
        (513, 512, 2, 1),
        (513, 128, 5, 4),
        (600, 128, 5, 4),
        (640, 128, 5, 5),
        (1024, 128, 8, 8),
        (100, 512, 1, 0),
    ],
)
def test_splitting(tokens: int, block_size: int, counted: int, dropped: int) -> None:
    trace = one_entry(tokens, -(tokens // -512))
    for partial, blocks in (("count", counted), ("drop", dropped)):
        [request] = make_requests(trace, block_size, partial)
        assert len(request.block_hashes) == request.lookup_blocks == blocks
        assert len(set(request.block_hashes)) == blocks
        assert request.num_tokens == blocks * block_size + 1
        assert request.prompt_tokens == tokens
        assert request.tokens_of(blocks, block_size) == min(tokens, blocks * block_size)


def test_blocks_of_answers_are_stored_and_not_looked_up() -> None:
    trace = one_entry(600, 2, full=True, answer=500)
    [whole] = make_requests(trace, 512, "count")
    assert (whole.lookup_blocks, len(whole.block_hashes)) == (1, 2)
    [split] = make_requests(trace, 128, "count")
    assert (split.lookup_blocks, len(split.block_hashes)) == (4, 8)


def test_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="block_size=100 must divide the 512"):
        make_requests(one_entry(512, 1), 100, "count")


def test_equal_ids_are_equal_only_behind_equal_ids() -> None:
    entries = [TraceEntry(0.0, 32, 0, ids) for ids in ((1, 2), (3, 2), (1, 2), (2, 1))]
    requests = make_requests(Trace("t", "x", 16, tuple(entries)), 8, "count")
    one, other, again, turned = (request.block_hashes for request in requests)
    assert one == again
    assert len({*one, *other, *turned}) == 12


def test_the_core_takes_it_as_a_request() -> None:
    entry = TraceEntry(2.0, 16, 0, (1,), "s", 3, 4, ttl_s=10.0, ends_session=True)
    [request] = make_requests(Trace("t", "x", 16, (entry,)), 16, "count")
    as_request: RequestLike = request
    assert as_request.num_prompt_tokens == as_request.num_tokens == 17
    assert len(as_request.all_token_ids) == 17
    ctx = request.block_context
    assert (ctx.session, ctx.turn, ctx.priority) == ("s", 3, 4)
    assert (ctx.expires_at, ctx.ends_session) == (12.0, True)
    needed = {name for name in vars(RequestLike) if not name.startswith("_")}
    assert all(hasattr(TraceRequest, name) for name in needed)
