"""Faults that users of other offloaders met, on real tensors; see
docs/testing.md for the numbers."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kvplugin.connectors.identity import StoreIdentity
from kvplugin.connectors.offload.config import OffloadConfig
from kvplugin.connectors.offload.scheduler import OffloadScheduler
from kvplugin.connectors.offload.worker import OffloadWorker
from kvplugin.contract import EngineInfo, GroupInfo, GroupKind, KVTensor
from kvplugin.errors import ConfigError, LayoutMismatchError
from kvplugin.integration.reference import (
    EngineConfig,
    LayerConfig,
    ReferenceEngine,
    SamplingParams,
)
from kvplugin.integration.reference.connector import (
    Connector,
    engine_info,
    offload,
)
from kvplugin.layout import PageLayout
from kvplugin.testing import COMPLETES, NEVER_ENDS
from kvplugin.worker.describe import describe_caches, describe_tensor
from tests.offload.test_hybrid_two_connectors import Pair, PairWorker
from tests.reference.bench import Bench, of_loads, of_stores, tokens, window
from tests.reference.donors import Donor
from tests.reference.models import (
    CROSS,
    ENCODER,
    FULL,
    MIXES,
    MLA,
    RECORDS,
    RECURRENT,
    WINDOW,
    assert_empty,
    compare,
    forget_local,
    settings,
    step_to_the_end,
    tiny,
)

CONFIG = OffloadConfig(cpu_bytes_to_use=8 << 20, offload_prompt_only=False)
HYBRID = {"full+window": (FULL, WINDOW), "with states": (window(9), RECURRENT, FULL)}
PROMPT = tokens(41)


# -- 6 --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["all", "align"])
def test_a_prompt_that_ends_with_a_block(mode: str) -> None:
    """Scenario 6: 32 tokens in blocks of 16, states after 16 and 32 are stored. All
    but the last token may be credited, so the one after 16 is what is loaded."""
    bench = Bench(
        (FULL, RECURRENT),
        fate=lambda job: COMPLETES,
        block_size=16,
        mamba_cache_mode=mode,
        max_num_batched_tokens=16,
    )
    bench.ask(tokens(32))
    bench.forget_local()
    assert bench.ask(tokens(32)) == 16


# -- 8 --------------------------------------------------------------------------------


def identity(layers: Sequence[LayerConfig] = (FULL, WINDOW), **changes: Any) -> str:
    """Of the stored blocks of an engine's last rank."""
    engine = ReferenceEngine(
        tiny(layers, dtype=changes.pop("dtype", "float64")), settings(**changes)
    )
    runner = engine.ranks.runners[-1]
    info = engine_info(
        runner.config,
        runner.tensors,
        hash_block_size=engine.plan.hash_block_size,
        rank=len(engine.ranks.runners) - 1,
        world_size=len(engine.ranks.runners),
        model=engine.identity,
    )
    return StoreIdentity.of(info, describe_caches(runner.tensors)).digest


def test_blocks_of_engines_that_differ_have_other_identities() -> None:
    """Scenario 8: by what an engine is. What a request is, is in its hashes
    (`tests/offload/test_identity.py`)."""
    others = [
        identity(model_name="another"),
        identity(dtype="float32"),
        identity(kv_cache_dtype="bfloat16"),
        identity(layout="HND"),
        identity(block_size=8),
        identity(tensor_parallel_size=2),
        identity(backend="FLASH_ATTN", block_size=16),
        identity((FULL, window(9))),
        identity((FULL, FULL)),
        identity((FULL, FULL, WINDOW)),
        identity((MLA, MLA)),
    ]
    assert len({identity(), *others}) == 1 + len(others)
    assert identity() == identity(num_blocks=300, max_model_len=48)
    assert identity() != identity(disable_hybrid_kv_cache_manager=True)


@pytest.mark.parametrize("layers", HYBRID.values(), ids=HYBRID)
def test_other_tenants_find_nothing_in_host_memory(layers: Any) -> None:
    """Scenario 8: by salt; and the owner finds all of it."""
    bench = Bench(layers, fate=lambda job: COMPLETES, max_num_batched_tokens=24)
    bench.ask(PROMPT, cache_salt="a")
    for salt in (None, "b", "aa"):
        bench.forget_local()
        assert bench.ask(PROMPT, cache_salt=salt) == 0
    for salt in ("a", None, "b", "aa"):
        bench.forget_local()
        assert bench.ask(PROMPT, cache_salt=salt) >= 24


# -- 24 -------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [(FULL, FULL), (FULL, WINDOW)], ids=["full", "both"])
def test_what_another_connector_brings_is_stored_when_it_is_there(layers: Any) -> None:
    """Scenario 24: P's load of 32 tokens is held; O stores its blocks only when P has
    filled them, and what it has then is P's."""
    model, config = tiny(layers), settings()
    donor = Donor(model, config)

    def worker(info: EngineInfo) -> Any:
        return PairWorker(donor.worker(info), OffloadWorker(info, CONFIG))

    def scheduler(info: EngineInfo) -> Any:
        half: Any = OffloadScheduler(info, CONFIG)
        return Pair(donor.remote, half)

    engine = donor.engine = ReferenceEngine(model, config, Connector(scheduler, worker))
    donor.fate = lambda job: NEVER_ENDS
    prompt, params = tokens(33), SamplingParams(max_tokens=4)
    req_id = donor.offer(prompt, 32, params)
    for _ in range(4):
        engine.step()
    assert not engine.scheduler.references.held.total()  # nothing is being stored
    donor.transports[0].release()
    step_to_the_end(engine)
    compare(model, prompt, engine.answers[req_id])
    forget_local(engine)
    again = engine.add_request(prompt, params)
    step_to_the_end(engine)
    assert engine.answers[again].num_cached_tokens == 32
    compare(model, prompt, engine.answers[again])
    for position, logits in engine.answers[req_id].logits.items():
        assert torch.equal(logits, engine.answers[again].logits[position])
    assert_empty(engine)
    engine.close()


# -- 30 -------------------------------------------------------------------------------


def test_scales_inside_a_page_travel_with_it() -> None:
    """Scenario 30: fp8 records, each with its scales. The blocks that are loaded into
    held others before."""
    model = tiny((RECORDS, RECORDS), dtype="float32")
    engine = ReferenceEngine(model, settings(), offload(CONFIG))
    (first,) = engine.generate([PROMPT])
    forget_local(engine)
    (runner,) = engine.ranks.runners
    for buffer in runner.tensors.buffers:
        buffer.view(torch.uint8).fill_(0x3B)
    (again,) = engine.generate([PROMPT])
    assert again.num_cached_tokens == 40
    assert again.token_ids == first.token_ids
    engine.close()


def quantised(blocks: int, heads: int, size: int) -> tuple[GroupInfo, torch.Tensor]:
    """int8 pages [blocks, heads, tokens, row and its fp32 scale]."""
    memory = torch.zeros(blocks, heads, 4, size + 4, dtype=torch.int8)
    page = PageLayout(page_bytes=heads * 4 * (size + 4), num_blocks=blocks)
    return GroupInfo(0, GroupKind.FULL, 4, {"layer": page}), memory


def kv_tensor(tensor: torch.Tensor, block_axis: int = 0) -> KVTensor:
    return KVTensor(tensor.data_ptr(), describe_tensor(tensor, block_axis))


def test_scales_beside_the_pages_are_refused() -> None:
    """Scenario 30: rows in one tensor, a scale a head in another. Moving the rows alone
    would give the next request this one's scales."""
    group, memory = quantised(8, 2, 16)
    info = EngineInfo("e", (group,), 8, 4)
    OffloadWorker(info, CONFIG).register({"layer": kv_tensor(memory)})
    scales = torch.zeros(2, 8)
    with pytest.raises(LayoutMismatchError, match="leading axis is not the block axis"):
        OffloadWorker(info, CONFIG).register(
            {"layer": kv_tensor(memory), "layer.scale": kv_tensor(scales, 1)}
        )
    rows = memory[..., :16].contiguous()
    with pytest.raises(LayoutMismatchError, match="page"):
        OffloadWorker(info, CONFIG).register({"layer": kv_tensor(rows)})


# -- 35 -------------------------------------------------------------------------------


def change_weights(bench: Bench) -> None:
    """As an RPC to the workers does: in place."""
    for name, weight in bench.model.weights.items():
        if "norm" not in name:
            weight.copy_((1.2 * weight).roll(1, 0))


@pytest.mark.parametrize("layers", HYBRID.values(), ids=HYBRID)
def test_kv_of_old_weights_is_found_nowhere(layers: Any) -> None:
    """Scenario 35: fill, change the weights, ask again: 0 hits, in both tiers."""
    bench = Bench(layers, fate=lambda job: COMPLETES, max_num_batched_tokens=24)
    bench.ask(PROMPT)
    assert bench.ask(PROMPT)
    change_weights(bench)
    assert bench.engine.reset_prefix_cache(weight_epoch=1)
    assert bench.ask(PROMPT) == 0
    bench.forget_local()
    assert bench.ask(PROMPT)  # of the new ones, and right


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("layers", HYBRID.values(), ids=HYBRID)
def test_who_runs_while_weights_change_leaves_nothing_of_the_old(
    layers: Any, depth: int
) -> None:
    """Scenario 35: a request with a store under way, and one whose load is."""
    held = [True]
    bench = Bench(
        layers,
        fate=lambda job: NEVER_ENDS if held[0] else COMPLETES,
        max_num_batched_tokens=24,
        pipeline_depth=depth,
    )
    engine = bench.engine
    storing = engine.add_request(PROMPT, SamplingParams(max_tokens=20))
    for _ in range(4):
        engine.step()
    assert bench.transport.pending
    change_weights(bench)
    engine.reset_prefix_cache(weight_epoch=1)
    held[0] = False
    bench.transport.release()
    step_to_the_end(engine)
    assert engine.answers[storing].finish_reason == "length"
    bench.forget_local()
    for _ in range(2):  # whatever is found is of the new weights: it is compared
        bench.ask([*PROMPT, 1])
        bench.forget_local()


def test_a_load_of_old_weights_is_not_waited_for() -> None:
    """Scenario 35: the request whose load is under way is computed anew."""
    bench = Bench((FULL, WINDOW), fate=of_loads(NEVER_ENDS))
    bench.ask(PROMPT)
    bench.forget_local()
    bench.add(PROMPT)
    for _ in range(3):
        bench.engine.step()
    assert bench.transport.pending
    change_weights(bench)
    assert not bench.engine.reset_prefix_cache(weight_epoch=1)
    for _ in range(8):
        bench.engine.step()
    bench.transport.release()
    bench.finish()
    assert bench.engine.reset_prefix_cache()


# -- 36 -------------------------------------------------------------------------------


def stored(bench: Bench) -> float:
    half = bench.engine.scheduler_half
    stats = half.take_stats() if half is not None else None
    return 0.0 if stats is None else stats.gauges["host_blocks_stored"]


@pytest.mark.parametrize("layers", HYBRID.values(), ids=HYBRID)
def test_a_reset_that_says_success_has_forgotten_all(layers: Any) -> None:
    """Scenario 36: and one of the engine's own blocks alone leaves host memory."""
    bench = Bench(layers, fate=lambda job: COMPLETES, max_num_batched_tokens=24)
    bench.ask(PROMPT)
    assert stored(bench)
    bench.forget_local()
    assert bench.ask(PROMPT)
    assert bench.engine.reset_prefix_cache()
    assert bench.ask(PROMPT) == 0
    bench.forget_local()
    assert bench.ask(PROMPT)


@pytest.mark.parametrize("direction", ["load", "store"])
def test_a_reset_while_a_copy_is_under_way(direction: str) -> None:
    """Scenario 36: no success before its bytes can do no harm, and none kept of it."""
    fate = of_loads(NEVER_ENDS) if direction == "load" else of_stores(NEVER_ENDS)
    bench = Bench((FULL, WINDOW), fate=fate)
    req_id = bench.add(PROMPT)
    if direction == "load":
        bench.finish()
        bench.forget_local()
        req_id = bench.add(PROMPT)
    for _ in range(3):
        bench.engine.step()
    assert bench.transport.pending
    assert not bench.engine.reset_prefix_cache()
    bench.engine.abort(req_id)
    bench.transport.release()
    bench.finish()
    assert bench.engine.reset_prefix_cache()
    assert bench.ask(PROMPT) == 0


def test_who_runs_during_a_reset_stores_nothing_more() -> None:
    """Scenario 36: its KV may be of what was to be forgotten."""
    bench = Bench((FULL, WINDOW), fate=lambda job: COMPLETES)
    bench.add(PROMPT, 12)
    for _ in range(3):
        bench.engine.step()
    assert not bench.engine.reset_prefix_cache()
    bench.finish()
    bench.forget_local()
    assert bench.ask(PROMPT) == 0


# -- 62 -------------------------------------------------------------------------------


NEEDS_GROUPS = {"full+recurrent", "window+recurrent+full"}
"""States and tokens cannot share blocks."""


@pytest.mark.parametrize("hybrid", [True, False], ids=["hybrid", "one group"])
@pytest.mark.parametrize("mix", MIXES)
def test_every_kind_is_served_or_refused_by_name(mix: str, hybrid: bool) -> None:
    """Scenario 62: kinds of layers, with the hybrid manager and without. Layers that
    share another's cache have no tensor."""
    config = settings(
        disable_hybrid_kv_cache_manager=not hybrid,
        max_num_batched_tokens=24,
        max_model_len=80,
    )
    model = tiny(MIXES[mix])
    if not hybrid and mix in NEEDS_GROUPS:
        with pytest.raises(ConfigError, match="hybrid"):
            ReferenceEngine(model, config, offload(CONFIG))
        return
    engine = ReferenceEngine(model, config, offload(CONFIG))
    for turn in range(2):
        req_id = engine.add_request(PROMPT, SamplingParams(max_tokens=4))
        step_to_the_end(engine)
        compare(model, PROMPT, engine.answers[req_id])
        assert (engine.answers[req_id].num_cached_tokens > 0) == turn
        forget_local(engine)
    assert_empty(engine)
    engine.close()


def without_cache(**changes: Any) -> EngineConfig:
    return settings(
        enable_prefix_caching=False,
        max_num_batched_tokens=4 * 64,
        max_num_seqs=4,
        **changes,
    )


def test_a_kind_that_is_not_served_is_named() -> None:
    """Scenario 62: cross-attention."""
    config = without_cache(max_num_encoder_input_tokens=12)
    with pytest.raises(ConfigError, match="cross_attention"):
        ReferenceEngine(tiny((FULL, CROSS)), config, offload(CONFIG))


def test_layers_without_a_cache_do_not_matter() -> None:
    """Scenario 62: encoder-only ones; nothing is cached, and nothing stored."""
    model = tiny((ENCODER, FULL))
    engine = ReferenceEngine(model, without_cache(), offload(CONFIG))
    for _ in range(2):
        (answer,) = engine.generate([PROMPT], SamplingParams(max_tokens=4))
        assert answer.num_cached_tokens == 0
        compare(model, PROMPT, answer)
    engine.close()


def test_layers_that_share_a_cache_are_copied_once() -> None:
    """Scenario 62: as many bytes as the layers with a cache have."""
    model = tiny(MIXES["sharing"])
    engine = ReferenceEngine(model, settings(), offload(CONFIG))
    engine.generate([PROMPT], SamplingParams(max_tokens=1))
    groups = engine.plan.scheduler.kv_cache_groups
    half = engine.scheduler_half
    stats = half.take_stats() if half is not None else None
    assert stats is not None
    block = max(group.bytes_per_block for group in groups)
    sharing = sum(len(group.kv_sharing_targets) for group in groups)
    assert sharing == 2
    assert stats.counters["stored_bytes"] <= block * stats.counters["stored_blocks"]
    engine.close()
