"""Random models for the tests of grouping: drawn from few values, so that layers meet.

What ours decides differently from vLLM 0.19.1 on purpose is not drawn here; those cases
stand one by one in `test_groups_oracles.py`.
"""

import random
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvplugin import spec as kinds
from kvplugin.groups import GroupingConfig
from kvplugin.spec import KVCacheSpec

Layer = tuple[str, dict[str, Any]]


class Shape(NamedTuple):
    """Heads and sizes of an attention layer; the second value goes with the first."""

    num_kv_heads: int
    head_size: int
    head_size_v: int


SHAPES = (Shape(2, 64, 64), Shape(4, 64, 64), Shape(1, 64, 32), Shape(3, 48, 48))
STATES = (((64, 3), (4, 8, 16)), ((32, 3), (2, 8, 16)), ((128, 8),))


@dataclass(frozen=True)
class Case:
    """One question to both cores, in plain data."""

    layers: dict[str, Layer]
    workers: list[list[str]]
    limits: dict[str, Any]
    available: list[int]
    disable_hybrid: bool = False
    override: int | None = None
    auto_fit: bool = False

    def specs(self) -> dict[str, KVCacheSpec]:
        """The layers as our specs."""
        return {
            name: getattr(kinds, kind)(**values)
            for name, (kind, values) in self.layers.items()
        }

    def config(self, *, vllm019: bool, pad: bool = False) -> GroupingConfig:
        """The limits and choices as ours."""
        return GroupingConfig(
            **self.limits,
            disable_hybrid_kv_cache_manager=self.disable_hybrid,
            num_gpu_blocks_override=self.override,
            auto_fit_max_model_len=self.auto_fit,
            vllm019_arithmetic=vllm019,
            pad_page_sizes=pad,
        )


def draw_case(rng: random.Random, version: str) -> Case:
    """A model of one to three kinds of layers on one or two workers."""
    kinds_here = [_draw_layer(rng, version) for _ in range(rng.choice((1, 2, 2, 3)))]
    counts = [rng.choice((1, 2, 3, 4, 5, 6, 8)) for _ in kinds_here]
    order = [i for i, count in enumerate(counts) for _ in range(count)]
    if rng.random() < 0.5:
        rng.shuffle(order)
    layers = {f"layers.{n}": kinds_here[i] for n, i in enumerate(order)}
    names = list(layers)
    if len(names) > 1 and rng.random() < 0.4:
        cut = rng.randint(1, len(names) - 1)
        workers = [names[:cut], names[cut:]]
    else:
        workers = [names] * rng.choice((1, 1, 2))
    scale = 10 ** rng.uniform(4, 8)
    return Case(
        layers=layers,
        workers=workers,
        limits={
            "max_model_len": rng.choice((1, 17, 100, 1000, 4096, 10000)),
            "max_num_batched_tokens": rng.choice((16, 100, 512, 2048)),
            "max_num_encoder_input_tokens": rng.choice((1, 100, 1500)),
            "decode_context_parallel_size": rng.choice((1, 1, 1, 1, 2)),
            "prefill_context_parallel_size": (
                rng.choice((1, 1, 1, 1, 2)) if version == "0.19.1" else 1
            ),
            "mamba_cache_mode": rng.choice(
                ("none", "align", "all") if version == "0.19.1" else ("none", "align")
            ),
        },
        available=[int(scale * rng.uniform(0.5, 2)) for _ in workers],
        disable_hybrid=rng.random() < 0.25,
        override=rng.choice((None, None, None, 1, 50)),
        auto_fit=rng.random() < 0.3,
    )


def _draw_layer(rng: random.Random, version: str) -> Layer:
    kind = rng.choice(("full", "full", "mla", "window", "window", "chunk", "mamba"))
    kind = "cross" if rng.random() < 0.05 else kind
    block_size = rng.choice((16, 16, 16, 32))
    if kind == "mamba":
        shapes = rng.choice(STATES)
        return "MambaSpec", {
            "block_size": block_size,
            "shapes": shapes,
            "dtypes": ("bfloat16", "float32")[: len(shapes)],
            "page_size_padded": rng.choice((None, 8192, 16384)),
            "num_speculative_blocks": rng.choice((0, 0, 2)),
        }
    if kind == "mla":
        return "MLAAttentionSpec", {
            "block_size": 16,
            "num_kv_heads": 1,
            "head_size": 576,
            "dtype": "bfloat16",
            "cache_dtype_str": rng.choice((None, "auto")),
        }
    shape = rng.choice(SHAPES)
    values: dict[str, Any] = {
        "block_size": block_size,
        "num_kv_heads": shape.num_kv_heads,
        "head_size": shape.head_size,
        "dtype": rng.choice(("bfloat16", "bfloat16", "float32", "float8_e4m3fn")),
        "page_size_padded": rng.choice((None, None, None, 65536)),
    }
    if kind == "full":
        return "FullAttentionSpec", values | {"head_size_v": shape.head_size_v}
    if kind == "cross":
        return "CrossAttentionSpec", values
    if kind == "window":
        return "SlidingWindowSpec", values | {"sliding_window": rng.choice((1, 128))}
    return "ChunkedLocalAttentionSpec", values | {"attention_chunk_size": 64}
