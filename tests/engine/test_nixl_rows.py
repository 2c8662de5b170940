"""What is said of the inside of KV tensors, for tensors as vLLM makes them."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1 import kv_cache_interface as vllm_specs

from kvplugin.contract import KVTensor
from kvplugin.integration.vllm import rows
from kvplugin.integration.vllm.rows import with_rows
from kvplugin.integration.vllm.translate import kv_tensors
from kvplugin.layout import plan_conversion
from tests.engine.test_translate import NUM_BLOCKS, cache_config, mamba
from tests.engine.version import is_019

pytestmark = pytest.mark.skipif(is_019(), reason="vLLM 0.19 has other views")


def full(block_size: int = 32, heads: int = 2, **arguments: Any) -> Any:
    common = {"num_kv_heads": heads, "head_size": 64, "dtype": torch.bfloat16}
    return vllm_specs.FullAttentionSpec(block_size=block_size, **(common | arguments))


def latent() -> Any:
    return vllm_specs.MLAAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16
    )


def fused(spec: Any, *, tokens_first: bool = False) -> torch.Tensor:
    """A layer's view [blocks, heads, tokens, key and value]."""
    heads, tokens = spec.num_kv_heads, spec.block_size
    width = spec.head_size + spec.head_size_v
    if tokens_first:
        made = torch.zeros(NUM_BLOCKS, tokens, heads, width, dtype=spec.dtype)
        return made.transpose(1, 2)
    return torch.zeros(NUM_BLOCKS, heads, tokens, width, dtype=spec.dtype)


def described(
    spec: Any,
    cache: torch.Tensor,
    backend: str,
    *,
    ranks: int = 1,
    rank: int = 0,
    scale: float = 1.0,
    model_heads: int = 8,
) -> KVTensor:
    """What `with_rows` says of one layer with this backend."""
    layer = SimpleNamespace(
        get_attn_backend=lambda: SimpleNamespace(get_name=lambda: backend),
        kv_cache_dtype="auto",
        _k_scale_float=scale,
        _v_scale_float=1.0,
    )
    vllm_config: Any = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={"layer.0": layer}),
        model_config=SimpleNamespace(
            dtype=torch.bfloat16, get_total_num_kv_heads=lambda: model_heads
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        parallel_config=SimpleNamespace(
            rank=rank, world_size=ranks, tensor_parallel_size=ranks
        ),
    )
    tensors = kv_tensors({"layer.0": cache}, NUM_BLOCKS)
    return with_rows(tensors, vllm_config, cache_config(spec))["layer.0"]


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, "vllm.kvplugin.nixl")
    return caplog


@pytest.mark.parametrize("backend", ["FLASH_ATTN", "TRITON_ATTN"])
def test_rows_of_fused_keys_and_values(backend, warnings):
    tensor = described(full(), fused(full()), backend)
    assert tensor.rows is not None
    assert [(part.name, part.row_bytes) for part in tensor.rows.parts] == [
        ("k", 128),
        ("v", 128),
    ]
    assert (tensor.rows.tokens, tensor.rows.heads) == (32, 2)
    assert not warnings.records


def test_layouts_are_converted_into_each_other_and_have_other_names():
    spec = full()
    nhd = described(spec, fused(spec, tokens_first=True), "FLASH_ATTN")
    hnd = described(spec, fused(spec), "FLASH_ATTN")
    assert nhd.interior != hnd.interior
    assert nhd.rows is not None
    assert hnd.rows is not None
    assert plan_conversion(nhd.rows, hnd.rows).chunk_tokens == 32


def test_cpu_attention_is_written_to_and_known(warnings):
    tensor = described(full(), fused(full()), "CPU_ATTN")
    assert tensor.rows is not None
    assert tensor.rows.pool_bytes == 32 * 2 * 2 * 128
    assert "CPU_ATTN" in tensor.interior
    assert tensor.total_heads == 2
    assert not warnings.records


@pytest.mark.parametrize("backend", ["CPU_MLA", "TRITON_MLA"])
def test_a_latent_is_one_row_for_all_ranks(backend):
    cache = torch.zeros(NUM_BLOCKS, 1, 16, 576, dtype=torch.bfloat16)
    tensor = described(latent(), cache, backend, ranks=2)
    assert tensor.rows is not None
    assert [part.row_bytes for part in tensor.rows.parts] == [1152]
    assert tensor.total_heads == 0


def test_states_have_a_name_and_no_rows(warnings):
    cache = torch.zeros(NUM_BLOCKS, 1, 1, 256, dtype=torch.int8)
    tensor = described(mamba(), cache, "GDN_ATTN")
    assert tensor.rows is None
    assert "bfloat16/float32/SD/cpu/(3,8)/(2,4)" in tensor.interior
    assert tensor.total_heads == 0
    assert not warnings.records


def test_states_of_one_rank_are_not_those_of_another():
    """Each has its share of the state."""
    cache = torch.zeros(NUM_BLOCKS, 1, 1, 256, dtype=torch.int8)
    names = {
        described(mamba(), cache, "GDN_ATTN", ranks=ranks, rank=rank).interior
        for ranks, rank in ((1, 0), (2, 0), (2, 1))
    }
    assert len(names) == 3


@pytest.mark.parametrize(
    ("backend", "spec", "reason"),
    [
        ("SOMEBODYS_ATTN", full(), "SOMEBODYS_ATTN is not known"),
        ("FLASH_ATTN", full(tokens_per_state=4), "tokens_per_state=4"),
        ("FLASH_ATTN", full(head_size_v=32), "is not as attention backend"),
    ],
)
def test_what_nobody_knows_is_moved_as_it_is_with_one_warning(
    backend, spec, reason, warnings
):
    tensor = described(spec, fused(full()), backend)
    assert tensor.rows is None
    assert backend in tensor.interior
    (record,) = warnings.records
    assert reason in record.getMessage()


def test_an_operation_that_has_changed_is_not_the_engines_end(warnings, monkeypatch):
    def fails(*_: Any) -> None:
        raise TypeError("_get_attn_isa() got other arguments")

    monkeypatch.setattr(rows, "probe", fails)
    assert described(full(), fused(full()), "CPU_ATTN").rows is None
    assert "got other arguments" in warnings.text


def test_scales_are_part_of_what_bytes_mean():
    plain = described(full(), fused(full()), "FLASH_ATTN")
    scaled = described(full(), fused(full()), "FLASH_ATTN", scale=0.5)
    assert plain.interior != scaled.interior
    assert plain.rows is not None
    assert scaled.rows is not None
    assert plain.rows.dtype != scaled.rows.dtype


@pytest.mark.parametrize(
    ("ranks", "heads", "model_heads", "total"),
    [(1, 8, 8, 8), (4, 2, 8, 8), (8, 1, 8, 8), (16, 1, 8, 8), (2, 1, 1, 1)],
)
def test_heads_are_counted_over_ranks(ranks, heads, model_heads, total):
    spec = full(heads=heads)
    tensor = described(
        spec, fused(spec), "FLASH_ATTN", ranks=ranks, model_heads=model_heads
    )
    assert tensor.total_heads == total
