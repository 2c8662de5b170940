"""What stock vLLM says of its tensors, groups and steps, without an engine."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed import kv_events
from vllm.v1 import kv_cache_interface as vllm_specs

from kvplugin.connectors.identity import StoreIdentity
from kvplugin.connectors.offload.config import OffloadConfig
from kvplugin.contract import EngineInfo, GroupKind, StateBlock
from kvplugin.errors import ConfigError
from kvplugin.events import MEDIUM_CPU, AllBlocksCleared, removed_events, stored_event
from kvplugin.integration.vllm.kv_events import as_vllms
from kvplugin.integration.vllm.offload import KVPluginOffloadConnector, _unserved
from kvplugin.integration.vllm.render import offload_transfer_config, parse_settings
from kvplugin.integration.vllm.steps import step
from kvplugin.integration.vllm.translate import engine_info, kv_tensors
from kvplugin.layout import PageLayout, Run, block_runs
from tests.engine.version import is_019

NUM_BLOCKS = 8
not_019 = pytest.mark.skipif(is_019(), reason="vLLM 0.19 has no such thing")


def attention(kind: str = "FullAttentionSpec", **arguments: Any) -> Any:
    """A spec of vLLM's: block of 16 tokens, 2 heads of 8, bf16."""
    common = {"num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16}
    return getattr(vllm_specs, kind)(block_size=16, **(common | arguments))


def mamba(mode: str = "align") -> Any:
    return vllm_specs.MambaSpec(
        block_size=16,
        shapes=((3, 8), (2, 4)),
        dtypes=(torch.bfloat16, torch.float32),
        page_size_padded=256,
        mamba_cache_mode=mode,
    )


def cache_config(*specs: Any, **of_groups: Any) -> Any:
    groups = [
        vllm_specs.KVCacheGroupSpec([f"layer.{i}"], spec, **of_groups)
        for i, spec in enumerate(specs)
    ]
    known = {} if is_019() else {"hash_block_size": 16}
    return vllm_specs.KVCacheConfig(
        num_blocks=NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups, **known
    )


def translated(config: Any, **parallel: int) -> EngineInfo:
    """`engine_info` of a model with these groups."""
    backend = SimpleNamespace(get_name=lambda: "CPU_ATTN")
    layers = {
        "layer.0": SimpleNamespace(get_attn_backend=lambda: backend),
        "experts": SimpleNamespace(),
    }
    vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            **({"rank": 0, "world_size": 1, "tensor_parallel_size": 1} | parallel)
        ),
        kv_transfer_config=SimpleNamespace(engine_id="engine"),
        cache_config=SimpleNamespace(
            block_size=16, enable_prefix_caching=True, prefix_caching_hash_algo="sha256"
        ),
        model_config=SimpleNamespace(
            model="some/model",
            revision=None,
            dtype=torch.bfloat16,
            quantization=None,
            max_model_len=4096,
        ),
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=512, scheduler_cls=None
        ),
        speculative_config=None,
        compilation_config=SimpleNamespace(static_forward_context=layers),
    )
    return engine_info(vllm_config, config, weight_epoch=3)


def test_an_engine_and_its_model_are_described():
    engine = translated(cache_config(attention()))
    assert (engine.max_model_len, engine.max_step_tokens) == (4096, 512)
    assert (engine.hash_block_size, engine.num_blocks) == (16, NUM_BLOCKS)
    assert engine.reports_failed_loads
    assert engine.model.name == "some/model"
    assert engine.model.dtype == "bfloat16"
    assert engine.model.backends == ("CPU_ATTN",)
    assert engine.model.hash_algorithm == "sha256"
    assert engine.model.weight_epoch == 3


def test_context_parallelism_is_refused_by_name():
    with pytest.raises(ConfigError, match="decode_context_parallel_size"):
        translated(cache_config(attention()), decode_context_parallel_size=2)


@pytest.mark.parametrize(
    ("spec", "kind", "window"),
    [
        (lambda: attention(), GroupKind.FULL, 0),
        # As where the manager of several groups is off: the mask stays the kernel's.
        (lambda: attention(sliding_window=32), GroupKind.FULL, 0),
        (lambda: attention("MLAAttentionSpec"), GroupKind.MLA, 0),
        (
            lambda: attention("SlidingWindowSpec", sliding_window=48),
            GroupKind.SLIDING_WINDOW,
            48,
        ),
        (
            lambda: attention("ChunkedLocalAttentionSpec", attention_chunk_size=64),
            GroupKind.CHUNKED_LOCAL,
            64,
        ),
        (mamba, GroupKind.MAMBA, 0),
    ],
)
def test_a_group_is_of_its_kind(spec, kind, window):
    (group,) = translated(cache_config(spec())).groups
    assert (group.kind, group.window, group.block_size) == (kind, window, 16)
    assert group.reusable
    assert not group.has_drafter
    assert not group.state_every_block


@not_019
def test_what_a_window_keeps_for_drafts_is_told():
    spec = attention("SlidingWindowSpec", sliding_window=48, extra_retained_tokens=2)
    (group,) = translated(cache_config(spec)).groups
    assert group.extra_history == 2


def test_states_at_every_block_are_told():
    (group,) = translated(cache_config(mamba("all"))).groups
    assert group.state_every_block


@not_019
def test_a_group_with_layers_of_a_drafter_is_told():
    config = cache_config(attention(), attention(), is_eagle_group=True)
    config.kv_cache_groups[0].is_eagle_group = False
    engine = translated(config)
    assert [group.has_drafter for group in engine.groups] == [False, True]


@not_019
def test_scratch_memory_and_what_vllm_does_not_transfer_are_no_ones_prefix():
    scratch = attention("CircularBufferSpec")
    config = cache_config(attention(), scratch, attention())
    config.kv_cache_groups[2].enable_kv_transfer = False
    engine = translated(config)
    assert [group.reusable for group in engine.groups] == [True, False, False]
    assert _unserved(engine) == ""


@not_019
def test_blocks_of_another_pool_are_not_served():
    config = cache_config(attention(), attention(), host_resident=True)
    config.kv_cache_groups[0].host_resident = False
    assert "other" in _unserved(translated(config))


def test_layers_of_different_pages_share_a_group():
    uniform = vllm_specs.UniformTypeKVCacheSpecs(
        block_size=16,
        kv_cache_specs={
            "layer.0": attention(),
            "layer.1": attention(num_kv_heads=1),
        },
    )
    (group,) = translated(cache_config(uniform)).groups
    assert group.kind is GroupKind.FULL
    pages = {name: page.page_bytes for name, page in group.layers.items()}
    assert pages["layer.0"] == 2 * pages["layer.1"]


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (lambda: attention("CrossAttentionSpec"), "cross_attention"),
        (lambda: mamba("none"), "mamba_cache_mode 'none'"),
    ],
)
def test_a_kind_that_is_not_served_is_named_whatever_is_beside_it(spec, why):
    assert why in _unserved(translated(cache_config(attention(), spec())))


@not_019
def test_states_that_a_row_does_not_name_reach_the_half():
    """Those inside a block, which vLLM offers too, end no boundary of ours."""
    offered = {"a": [(1, 7, 32), (1, 9, 40), (0, 3, 48)], "b": [(1, 2, 16)]}
    decided = SimpleNamespace(
        num_scheduled_tokens={"a": 10, "b": 1},
        total_num_scheduled_tokens=11,
        preempted_req_ids=None,
        scheduled_new_reqs=[SimpleNamespace(req_id="a", num_computed_tokens=0)],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=["b"],
            resumed_req_ids=set(),
            new_block_ids=[None],
            num_computed_tokens=[16],
        ),
        kv_connector_block_state=SimpleNamespace(boundary_state_offloads=offered),
    )
    half: Any = SimpleNamespace(watched={"a"})
    (scheduled,) = step(half, [16, 16], decided).scheduled
    assert list(scheduled.states) == [StateBlock(1, 32, 7), StateBlock(0, 48, 3)]
    del decided.kv_connector_block_state  # as in 0.19
    (scheduled,) = step(half, [16, 16], decided).scheduled
    assert list(scheduled.states) == []


def test_memory_that_no_copy_reaches_is_refused_by_name():
    elsewhere = {"layer": torch.empty(4, 2, device="meta")}
    with pytest.raises(ConfigError, match=r"memory of meta.*cpu, cuda"):
        kv_tensors(elsewhere, 4)


def test_a_tensor_is_described_by_address_and_byte_strides():
    cache = torch.empty(4, 3, 2, dtype=torch.bfloat16).transpose(1, 2)
    described = kv_tensors({"layer": cache}, 4)["layer"]
    assert described.address == cache.data_ptr()
    assert described.layout.shape == (4, 2, 3)
    assert described.layout.strides == (12, 2, 4)
    assert described.layout.block_axis == 0
    assert described.device == "cpu"


@not_019
def test_the_states_of_a_padded_page_are_one_run():
    """As Qwen3-Next's: int8 views of a part of each page."""
    raw = torch.empty(8 * 131_072, dtype=torch.int8)
    view = torch.as_strided(raw, (8, 1, 1, 70_144), (131_072, 70_144, 70_144, 1))
    described = kv_tensors({"layer": view}, 8)["layer"]
    page = PageLayout(page_bytes=131_072, num_blocks=8, padded=True)
    assert block_runs(described.layout, page) == (Run(0, 131_072, 70_144),)


@not_019
def test_latent_pages_are_one_run():
    view = torch.empty(8, 1, 16, 576, dtype=torch.bfloat16)
    described = kv_tensors({"layer": view}, 8)["layer"]
    page = PageLayout(page_bytes=18_432, num_blocks=8)
    assert block_runs(described.layout, page) == (Run(0, 18_432, 18_432),)


def test_events_are_vllms_own():
    stored = as_vllms(stored_event([b"\x01" * 32], None, [], 16, MEDIUM_CPU, 1))
    assert type(stored) is kv_events.BlockStored
    assert stored.medium == MEDIUM_CPU
    assert stored.block_hashes == [0x0101010101010101]
    assert is_019() or stored.group_idx == 1
    (removed,) = map(as_vllms, removed_events([(1, b"\x01" * 32)], MEDIUM_CPU))
    assert type(removed) is kv_events.BlockRemoved
    assert removed.block_hashes == stored.block_hashes
    assert type(as_vllms(AllBlocksCleared())) is kv_events.AllBlocksCleared


def test_nothing_is_asked_of_vllms_layout_or_graphs():
    """Whole pages are copied between steps: any layout will do, and no layer waits."""
    connector = KVPluginOffloadConnector
    assert connector.get_required_kvcache_layout(None) is None
    assert not connector.requires_piecewise_for_cudagraph({})


def test_both_halves_are_of_the_weight_epoch_of_the_configuration():
    connector = object.__new__(KVPluginOffloadConnector)
    connector._vllm_config = SimpleNamespace(kv_events_config=None)
    engine = translated(cache_config(attention()))

    def engine_info(weight_epoch):
        model = dataclasses.replace(engine.model, weight_epoch=weight_epoch)
        return dataclasses.replace(engine, model=model)

    connector.engine_info = engine_info

    def identities(epoch):
        config = OffloadConfig(cpu_bytes_to_use=1 << 20, weight_epoch=epoch)
        halves = connector._scheduler_half(config), connector._worker_half(config)
        return [half._identity for half in halves]

    old, new = identities(3), identities(4)
    assert old == [StoreIdentity.of(engine_info(3)).shared] * 2
    assert new == [StoreIdentity.of(engine_info(4)).shared] * 2


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("8GiB", 8 << 30),
        ("8gib", 8 << 30),
        ("1.5G", 1_500_000_000),
        ("8kB", 8000),
        ("512", 512),
    ],
)
def test_sizes_are_read_as_people_write_them(text, nbytes):
    assert parse_settings([f"cpu_bytes_to_use={text}"]) == {"cpu_bytes_to_use": nbytes}


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["cpu_bytes_to_use"], "key=value"),
        (["cpu_bytes_to_use=1", "cpu_bytes_to_use=2"], "set twice"),
    ],
)
def test_settings_that_say_nothing_or_too_much_are_refused(texts, message):
    with pytest.raises(ConfigError, match=message):
        parse_settings(texts)


@pytest.mark.parametrize(
    "settings",
    [
        {"eviction_policy": "LRU"},
        {"copy_wait_ms": 1e300},
        {"blocks_per_chunk": 0},
        {"cpu_bytes_to_use": "8GiB"},
        {1: 2},
    ],
)
def test_what_the_engine_would_refuse_is_refused_when_rendered(settings):
    with pytest.raises(ConfigError):
        offload_transfer_config({"cpu_bytes_to_use": 1 << 30} | settings)
