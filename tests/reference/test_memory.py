"""Where KV lies changes no answer: layouts, backends, kernel blocks, dtypes, ranks."""

from typing import Any

import pytest

from kvplugin.errors import ConfigError
from kvplugin.integration.reference import ReferenceEngine
from tests.reference.models import (
    DIFFKV,
    FULL,
    MIXES,
    MLA,
    RECORDS,
    SINK,
    WINDOW,
    prompts,
    serve,
    settings,
    tiny,
)

BATCH = prompts(3, common=37, own=9)
SPLIT = ["FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION", "TREE_ATTN"]
FUSED = ["FLASH_ATTN_DIFFKV", "FLASH_ATTN@0.32", "FLASHINFER@0.32", "TRITON_ATTN@0.32"]
PACKED = ["ROCM_ATTN", "CPU_ATTN", "CPU_ATTN@0.32", "FLASHINFER_SM100"]


def run(layers: Any, **changes: Any) -> ReferenceEngine:
    """Serve with blocks of 16 tokens, hits included."""
    config = settings(**({"block_size": 16, "num_blocks": 80} | changes))
    engine, _ = serve(tiny(layers), config, [BATCH[:1], BATCH])
    assert any(a.num_cached_tokens for a in engine.answers.values())
    return engine


@pytest.mark.parametrize(
    "layers",
    [
        "full",
        pytest.param("full+window", marks=pytest.mark.full),
        "window+recurrent+full",
    ],
)
@pytest.mark.parametrize("backend", [*SPLIT, *FUSED, *PACKED, "REFERENCE"])
def test_backends(backend: str, layers: str) -> None:
    """In NHD or, where the backend reads no other, in HND."""
    block_size = 32 if backend == "CPU_ATTN@0.32" else 16
    layout = "HND" if "SM100" in backend or "CPU" in backend else "NHD"
    run(MIXES[layers], backend=backend, layout=layout, block_size=block_size)


@pytest.mark.parametrize("layers", ["full", "full+window", "window+recurrent+full"])
@pytest.mark.parametrize(
    "backend", ["FLASHINFER", "FLASH_ATTN", "FLASH_ATTN@0.32", "REFERENCE"]
)
def test_heads_before_tokens(backend: str, layers: str) -> None:
    engine = run(MIXES[layers], backend=backend, layout="HND")
    assert engine.plan.layout == "LBHNC"


@pytest.mark.parametrize("layout", ["BLNHC", "BHLNC", "BLHNC", "LHBNC"])
def test_layouts_of_one_buffer_and_of_scattered_blocks(layout: str) -> None:
    backend = "FLASH_ATTN@0.32"
    run((FULL, FULL, FULL), backend=backend, layout=layout)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("backend", ["FLASH_ATTN_DIFFKV", "REFERENCE"])
def test_values_of_another_size(backend: str, layout: str) -> None:
    run((DIFFKV, FULL), backend=backend, layout=layout)


@pytest.mark.parametrize("backend", ["TRITON_MLA", "REFERENCE_MLA"])
def test_latents(backend: str) -> None:
    run((MLA, MLA, FULL), mla_backend=backend)


@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("layers", [(FULL, WINDOW), (MLA, FULL), (SINK, SINK)])
def test_kernel_blocks_smaller_than_blocks(layers: Any, layout: str, size: int) -> None:
    if layers[0] is SINK:
        layers = (type(SINK)(kind="sink", sink_len=16),) * 2
    engine = run(layers, kernel_block_size=size, layout=layout, backend="REFERENCE")
    assert set(engine.plan.kernel_block_sizes) == {size}


def test_the_kernel_block_is_what_the_backend_reads() -> None:
    config = settings(backend="FLASHINFER", block_size=48, max_model_len=96)
    engine, _ = serve(tiny((FULL, FULL)), config, [BATCH])
    assert engine.plan.kernel_block_sizes == (16,)


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, "NHD"),
        pytest.param(2, "HND", marks=pytest.mark.full),
        pytest.param(4, "NHD", marks=pytest.mark.full),
        (4, "HND"),
    ],
)
@pytest.mark.parametrize("mix", MIXES)
def test_tensor_parallel_ranks(mix: str, layout: str, ranks: int) -> None:
    """Four ranks share two key heads: two have copies of each."""
    config = settings(tensor_parallel_size=ranks, layout=layout)
    serve(tiny(MIXES[mix]), config, [BATCH[:1], BATCH])


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.25)]
)
def test_dtypes_of_models(dtype: str, tolerance: float) -> None:
    """They differ from the dense forward in the order of sums only."""
    model = tiny((FULL, WINDOW), dtype=dtype)
    serve(model, settings(), [BATCH[:1], BATCH], tolerance=tolerance)


@pytest.mark.parametrize("layers", [(FULL, WINDOW), (MLA, FULL), (SINK, SINK)])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        ("float32", 1e-6),
        ("bfloat16", 0.02),
        ("float16", 0.004),
        ("float8_e4m3fn", 0.3),
        ("float8_e5m2", 0.5),
    ],
)
def test_narrow_caches(dtype: str, tolerance: float, layers: Any) -> None:
    """Rounded alike, the dense forward agrees; unrounded, within the tolerance."""
    model, config = tiny(layers), settings(kv_cache_dtype=dtype)
    rounds = [BATCH[:1], BATCH]
    serve(model, config, rounds, tolerance=1e-9, kv_cache_dtype=dtype)
    serve(model, config, rounds, tolerance=tolerance)


def test_records_in_fp64_models_with_a_backend_of_the_table() -> None:
    config = settings(
        block_size=64,
        max_model_len=128,
        num_blocks=20,
        mla_fp8_backend="FLASHMLA_SPARSE_FP8",
    )
    serve(tiny((RECORDS, RECORDS)), config, [BATCH[:1], BATCH], tolerance=0.5)


def test_padded_pages_and_small_kernel_blocks_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="padded"):
        ReferenceEngine(
            tiny((LARGE_VALUES, WINDOW)), settings(block_size=16, kernel_block_size=4)
        )


LARGE_VALUES = type(FULL)(head_size_v=12)
