"""What is handed over of rows that a real KV cache manager made."""

from collections.abc import Callable

import hypothesis.strategies as st
from hypothesis import given, settings

from kvplugin.contract import GroupInfo, GroupKind
from kvplugin.spec import KVCacheSpec, cdiv
from tests.core.manager_setups import Setup, chunk, full, mamba, mla, window
from tests.nixl.producer import TO_DECODER, Producer, group

BLOCK = 4
KINDS: dict[str, tuple[KVCacheSpec, GroupInfo, Callable[[int], int]]] = {
    "full": (full(), group(block_size=BLOCK), lambda place: 0),
    "mla": (mla(), group(GroupKind.MLA, block_size=BLOCK), lambda place: 0),
    **{
        f"window {reach}": (
            window(reach),
            group(GroupKind.SLIDING_WINDOW, block_size=BLOCK, window=reach),
            lambda place, reach=reach: max(place - reach + 1, 0),  # type: ignore[misc]
        )
        for reach in (1, 4, 5, 8, 11)
    },
    "chunk 8": (
        chunk(8),
        group(GroupKind.CHUNKED_LOCAL, block_size=BLOCK, window=8),
        lambda place: place // 8 * 8,
    ),
}
"""Of token-wise groups: where the token at a place begins to read."""
STATES = {
    "a step": (mamba("align"), group(GroupKind.MAMBA, block_size=BLOCK)),
    "a step, drafts": (
        mamba("align", drafts=2),
        group(GroupKind.MAMBA, block_size=BLOCK),
    ),
    "a block": (
        mamba("all"),
        group(GroupKind.MAMBA, block_size=BLOCK, state_every_block=True),
    ),
}


@settings(max_examples=150, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=3),
    state=st.sampled_from([None, *STATES]),
    steps=st.lists(st.integers(1, 4), max_size=5),
    last=st.integers(1, 10),
)
def test_who_goes_on_finds_all_that_it_reads_where_it_was_written(
    kinds: list[str], state: str | None, steps: list[int], last: int
) -> None:
    """A prompt computed in steps that end with blocks, but for the last one. The
    reader computes its last token again, or the next one."""
    used = [KINDS[kind] for kind in kinds]
    specs = [spec for spec, _, _ in used] + ([STATES[state][0]] if state else [])
    groups = [info for _, info, _ in used] + ([STATES[state][1]] if state else [])
    setup = Setup(tuple(specs), num_blocks=200, max_model_len=200)
    counts = [count * BLOCK for count in steps] + [last]
    tokens = sum(counts)
    manager, request = setup.manager(), setup.request("req-1", range(tokens))
    written: list[dict[int, int]] = [{} for _ in groups]
    rows: tuple[list[int], ...] = ()
    for count in counts:
        assert manager.allocate_slots(request, count) is not None
        rows = tuple(map(list, manager.get_block_ids("req-1")))
        before, after = request.num_computed_tokens, request.num_computed_tokens + count
        for index, row in enumerate(rows):
            for place in range(before, after):
                written[index][place] = row[place // BLOCK]
            if index >= len(used):
                written[index] = {after - 1: row[cdiv(after, BLOCK) - 1]}
        request.num_computed_tokens = after

    producer = Producer(*groups)
    told = producer.hand_over(*rows, tokens=tokens, params=TO_DECODER)
    handed = told["remote_block_ids"]
    assert len(handed) == len(groups)
    for index, (_, _, begins) in enumerate(used):
        first = cdiv(tokens, BLOCK) - len(handed[index])
        for place in range(begins(tokens - 1), tokens):
            block = handed[index][place // BLOCK - first]
            assert block == written[index][place] != 0
    if state:
        assert handed[-1] == [written[-1][tokens - 1]] != [0]
