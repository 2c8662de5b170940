"""Offload of every mix of layers: hits, logits and bytes are those of a local hit."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kvplugin.contract import CopyJob
from kvplugin.integration.reference import LayerConfig
from kvplugin.spec import cdiv
from kvplugin.testing import COMPLETES, LATE, FaultyTransport
from tests.reference.bench import BLOCK_BYTES, Bench, tokens, window
from tests.reference.models import (
    FULL,
    MIXES,
    MLA,
    RECURRENT,
    WINDOW,
    fewest_blocks,
    settings,
)
from tests.reference.pages import Pages

WITH_STATES = [name for name, layers in MIXES.items() if RECURRENT in layers]
FEW = ("full+window", "full+chunked", "window+recurrent+full", "mla")
"""One of each sort of group, for the normal run."""


def case(*values: Any, full: bool) -> Any:
    """Of a matrix; one that is `full` is for the long run only."""
    return pytest.param(*values, marks=[pytest.mark.full] if full else [])


ALL = [case(mix, full=mix not in FEW) for mix in MIXES]
CASES = [
    *(case(mix, "align", "NHD", 1, full=False) for mix in MIXES),
    *(case(mix, "align", "HND", 2, full=mix not in FEW) for mix in MIXES),
    *(case(mix, "all", "HND", 1, full=mix not in FEW) for mix in WITH_STATES),
]
"""Mix, mode of states, layout, ranks."""
DOCUMENT = tokens(41)


def questions(*, unit: int) -> list[list[int]]:
    """Prompts that share a document, whole and in part, longer and shorter, and such
    that end with a block."""
    return [
        DOCUMENT,
        [*DOCUMENT, *tokens(9, 1)],
        [*DOCUMENT[:24], *tokens(13, 2)],
        DOCUMENT[: 2 * unit],
        [*DOCUMENT[: 2 * unit], 5],
        [*DOCUMENT, *tokens(9, 1), *tokens(6, 3)],
        DOCUMENT,
    ]


def unit_of(bench: Bench) -> int:
    groups = bench.engine.plan.scheduler.kv_cache_groups
    return max(group.kv_cache_spec.block_size for group in groups)


def serve_alike(local: Bench, loaded: Bench, prompts: Sequence[list[int]]) -> list[int]:
    """Serve prompts one by one, with hits in the one and loads in the other; the hits,
    which must be the same ones."""
    hits = []
    for prompt in prompts:
        loaded.forget_local()
        ids = [bench.add(prompt) for bench in (local, loaded)]
        answers = []
        for bench, req_id in zip((local, loaded), ids, strict=True):
            bench.finish()
            answers.append(bench.engine.answers[req_id])
        one, other = answers
        assert one.num_cached_tokens == other.num_cached_tokens
        assert one.token_ids == other.token_ids
        for position, logits in one.logits.items():
            assert torch.equal(logits, other.logits[position])
        hits.append(one.num_cached_tokens)
    return hits


@pytest.mark.parametrize(("mix", "mode", "layout", "ranks"), CASES)
def test_a_loaded_hit_is_a_local_hit(
    mix: str, mode: str, layout: str, ranks: int
) -> None:
    """As many tokens, and bit by bit the same logits. Both are also compared with the
    dense forward, and every row that is read with what was written."""
    changes: dict[str, Any] = {
        "mamba_cache_mode": mode,
        "layout": layout,
        "tensor_parallel_size": ranks,
        "max_num_batched_tokens": 24,
        "max_model_len": 80,
    }
    local = Bench(MIXES[mix], **changes)
    loaded = Bench(MIXES[mix], fate=lambda job: COMPLETES, **changes)
    hits = serve_alike(local, loaded, questions(unit=unit_of(local)))
    assert hits[0] == 0
    assert all(hits[1:3] + hits[5:])


@pytest.mark.parametrize("chunk", [case(1, full=True), 3])
@pytest.mark.parametrize("mix", ALL)
def test_prompts_in_several_steps_and_together(mix: str, chunk: int) -> None:
    """Chunks of several blocks, copies that take their time, requests that share."""
    bench = Bench(
        MIXES[mix],
        fate=lambda job: LATE if job.id % 2 else COMPLETES,
        offload={"blocks_per_chunk": chunk},
        max_num_batched_tokens=24,
        max_model_len=80,
    )
    prompts = questions(unit=unit_of(bench))
    for _ in range(3):
        ids = [bench.add(prompt, 6) for prompt in prompts]
        bench.finish()
        bench.forget_local()
    assert any(bench.engine.answers[req_id].num_cached_tokens for req_id in ids)


@pytest.mark.parametrize("mix", ALL)
def test_small_pools_on_both_sides(mix: str) -> None:
    """Preemption, eviction from host memory, loads into blocks that were others'."""
    small = {"max_model_len": 64, "max_num_batched_tokens": 32}
    whole = Bench(MIXES[mix], **small)
    bench = Bench(
        MIXES[mix],
        fate=lambda job: LATE if job.id % 3 else COMPLETES,
        host_blocks=3 * bytes_of_the_longest(whole) // BLOCK_BYTES,
        num_blocks=fewest_blocks(whole.model, settings(**small)),
        scheduler_reserve_full_isl=False,
        **small,
    )
    hits = 0
    for turn in range(4):
        for seed in (1, 2, 3, 10 + turn, 20 + turn):
            bench.add([*tokens(16), *tokens(12, seed)], 24)
        ids = list(bench.asked)
        bench.finish()
        bench.forget_local()
        answers = [bench.engine.answers[req_id] for req_id in ids]
        hits += sum(answer.num_cached_tokens for answer in answers)
    half = bench.engine.scheduler_half
    stats = half.take_stats() if half is not None else None
    assert stats is not None
    assert stats.counters["evicted_blocks"]
    assert hits
    if mix not in ("window", "recurrent"):  # whose requests stop growing
        assert bench.preemptions


def bytes_of_the_longest(bench: Bench) -> int:
    """Of the KV of one request of `max_model_len`."""
    plan = bench.engine.plan
    return sum(
        cdiv(plan.limits.max_model_len, group.kv_cache_spec.block_size)
        * group.bytes_per_block
        for group in plan.scheduler.kv_cache_groups
    )


@pytest.mark.parametrize(
    "lengths",
    [(3, 4, 5, 15, 16, 17, 24, 32, 33), case(range(1, 101), full=True)],
    ids=["some", "all"],
)
@pytest.mark.parametrize(
    ("mix", "mode"),
    [
        ("full+window", "align"),
        ("full+chunked", "align"),
        ("full+recurrent", "align"),
        ("full+recurrent", "all"),
    ],
)
def test_every_length_of_prompt(mix: str, mode: str, lengths: Sequence[int]) -> None:
    """Prompts that end anywhere in a block, among them such that end with one."""
    changes: dict[str, Any] = {
        "mamba_cache_mode": mode,
        "max_num_batched_tokens": 16,
        "max_model_len": 128,
    }
    if RECURRENT in MIXES[mix]:
        changes["block_size"] = 8
    local = Bench(MIXES[mix], **changes)
    loaded = Bench(MIXES[mix], fate=lambda job: COMPLETES, **changes)
    prompts = [tokens(length, length) for length in lengths]
    serve_alike(local, loaded, [prompt for prompt in prompts for _ in range(2)])


@pytest.mark.parametrize("block", [(8, 16), (8, 32)], ids=str)
def test_states_in_larger_blocks_than_attention(block: tuple[int, int]) -> None:
    attention, states = block
    changes: dict[str, Any] = {
        "block_size": attention,
        "mamba_cache_mode": "all",
        "mamba_chunk_size": states,
        "max_model_len": 128,
    }
    layers = (FULL, RECURRENT, WINDOW)
    local = Bench(layers, **changes)
    loaded = Bench(layers, fate=lambda job: COMPLETES, **changes)
    prompt = tokens(100)
    asked = [prompt[:67], prompt, [*prompt[:70], 1, 2], prompt]
    hits = serve_alike(local, loaded, asked)
    assert hits[1:] == [
        67 // states * states,
        70 // states * states,
        100 // states * states,
    ]


def test_layers_of_a_page_that_lie_together() -> None:
    """BLNHC: the layers of a group in one piece a block."""
    changes: dict[str, Any] = {"layout": "BLNHC"}
    local = Bench((FULL, FULL, FULL), **changes)
    loaded = Bench((FULL, FULL, FULL), fate=lambda job: COMPLETES, **changes)
    assert all(serve_alike(local, loaded, questions(unit=4))[1:3])


def test_states_that_are_not_kept_are_never_offered() -> None:
    """Mode ``none``: attention blocks are stored, and worth nothing without a state."""
    bench = Bench(
        (FULL, RECURRENT), fate=lambda job: COMPLETES, mamba_cache_mode="none"
    )
    for _ in range(2):
        assert bench.ask(tokens(40)) == 0
        bench.forget_local()


class Eager(FaultyTransport):
    """Loads are there as soon as they are ordered."""

    def submit(self, job: CopyJob) -> None:
        super().submit(job)
        if not job.store:
            self.move(job.id)


@pytest.mark.parametrize("mix", [*WITH_STATES, "full+window"])
def test_nothing_touches_a_block_while_it_is_loaded(mix: str) -> None:
    """The step that orders a load also zeroes blocks: not after they are filled."""
    bench = Bench(
        MIXES[mix],
        fate=lambda job: COMPLETES,
        transport=Eager,
        max_num_batched_tokens=24,
    )
    bench.ask(DOCUMENT)
    bench.forget_local()
    assert bench.ask(DOCUMENT)


@pytest.mark.parametrize("mix", ["mla", "full", "full+window", "window+recurrent+full"])
def test_an_engine_without_a_cache_of_its_own(mix: str) -> None:
    """As vLLM is for MLA on some CPUs: host memory is all that it has."""
    changes: dict[str, Any] = {"max_num_batched_tokens": 24, "max_model_len": 80}
    local = Bench(MIXES[mix], **changes)
    changes["enable_prefix_caching"] = False
    loaded = Bench(MIXES[mix], fate=lambda job: COMPLETES, **changes)
    hits = []
    for prompt in (DOCUMENT, [*DOCUMENT, 1, 2], DOCUMENT):
        assert loaded.ask(prompt) == local.ask(prompt)
        hits.append(loaded.ask(prompt))
    assert all(hits)


# -- drafts ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layers", [(FULL, FULL), (FULL, WINDOW), (FULL, window(9), window(9)), (MLA, FULL)]
)
def test_a_drafters_kv_is_loaded_with_the_rest(layers: Sequence[LayerConfig]) -> None:
    """Two continuations of one document: what the drafter has for the last token
    before they part is of one of them."""
    changes: dict[str, Any] = {"drafter": True, "num_drafts": 2, "max_model_len": 80}
    loaded = Bench(layers, fate=lambda job: COMPLETES, **changes)
    asked = [
        [*DOCUMENT[:24], *tokens(13, 2)],
        [*DOCUMENT[:24], *tokens(13, 3)],
        [*DOCUMENT[:24], *tokens(13, 4)],
        [*DOCUMENT[:24], *tokens(13, 2)],
    ]
    hits = []
    for prompt in asked:
        loaded.forget_local()
        hits.append(loaded.ask(prompt, 12))
    assert hits == [0, 20, 20, 32]


@pytest.mark.parametrize("right", [0.0, 0.6])
@pytest.mark.parametrize("mode", ["align", "all"])
@pytest.mark.parametrize("mix", ["full+recurrent", "window+recurrent+full"])
def test_states_of_drafts_are_nobodys(mix: str, mode: str, right: float) -> None:
    """A state that a rejected draft has touched is never stored."""
    bench = Bench(
        MIXES[mix],
        fate=lambda job: COMPLETES,
        right=right,
        num_drafts=2,
        mamba_cache_mode=mode,
        max_num_batched_tokens=24,
        max_model_len=128,
    )
    prompt = tokens(30)
    req_id = bench.add(prompt, 40)
    bench.finish()
    said = bench.engine.answers[req_id].token_ids
    for length in (45, 58, 66):
        bench.forget_local()
        assert bench.ask([*prompt, *said][:length], 6)


# -- bytes ----------------------------------------------------------------------------

BYTES: dict[str, tuple[Sequence[LayerConfig], dict[str, Any]]] = {
    "full": ((FULL, FULL), {}),
    "full, two ranks": ((FULL, FULL), {"tensor_parallel_size": 2, "layout": "HND"}),
    "full+window": ((FULL, WINDOW), {}),
    "mla": ((MLA, MLA), {}),
    "full+states": ((FULL, RECURRENT), {"mamba_cache_mode": "all", "block_size": 8}),
}


@pytest.mark.parametrize("chunk", [1, case(2, full=True)])
@pytest.mark.parametrize("model", BYTES)
def test_two_hundred_chunks_byte_by_byte(model: str, chunk: int) -> None:
    """Every block of every layer is, after the load, what the engine had computed."""
    layers, more = BYTES[model]
    count = 200 * more.get("block_size", 4) * chunk
    pages = Pages()
    bench = pages.bench = Bench(
        layers,
        fate=lambda job: COMPLETES,
        host_blocks=40_000,
        offload={"blocks_per_chunk": chunk},
        move=pages.move,
        **(
            {
                "num_blocks": 2000,
                "max_model_len": count + 32,
                "max_num_batched_tokens": 256,
                "record_logits": False,
            }
            | more
        ),
    )
    engine, prompt = bench.engine, tokens(count + 1)
    for _ in range(2):
        req_id = engine.add_request(prompt)
        while not engine.answers[req_id].token_ids:
            engine.step()
        engine.abort(req_id)
        engine.run()
        bench.forget_local()
    assert engine.answers[req_id].num_cached_tokens == count
    pages.check()
    dense = [entry for rank, group, entry in pages.loaded if rank == group == 0]
    assert len(dense) == 200 * chunk


@pytest.mark.parametrize("mix", ALL)
def test_zeros_in_place_of_one_groups_bytes_are_noticed(mix: str) -> None:
    """The comparisons of this module see each group, also where tokens stay equal."""
    groups = len(Bench(MIXES[mix]).engine.plan.scheduler.kv_cache_groups)
    for group in range(groups):
        pages = Pages()
        bench = pages.bench = Bench(
            MIXES[mix],
            fate=lambda job: COMPLETES,
            move=pages.move,
            max_num_batched_tokens=24,
        )
        prompt = [*DOCUMENT, *tokens(5, 1)]
        bench.ask(prompt)
        bench.forget_local()
        pages.zeroed_group = group
        with pytest.raises(AssertionError):
            bench.ask(prompt)
        with pytest.raises(AssertionError, match="other bytes"):
            pages.check()
