"""Bytes of a page, blocks of a request, what merges, and what is refused."""

import pickle
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplugin.errors import ConfigError, KVPluginError
from kvplugin.spec import (
    MAMBA_CACHE_MODES,
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    EngineLimits,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    NotMergeableError,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    dtype_bytes,
)

HEADS: dict[str, Any] = {
    "block_size": 16,
    "num_kv_heads": 8,
    "head_size": 128,
    "dtype": "bfloat16",
}
FULL = FullAttentionSpec(**HEADS)
WINDOW = SlidingWindowSpec(**HEADS, sliding_window=128)
CHUNK = ChunkedLocalAttentionSpec(**HEADS, attention_chunk_size=64)
MLA = MLAAttentionSpec(**HEADS | {"num_kv_heads": 1, "head_size": 576})
SINK = SinkFullAttentionSpec(**HEADS, sink_len=32)
CROSS = CrossAttentionSpec(**HEADS)
ENCODER = EncoderOnlyAttentionSpec(**HEADS)
MAMBA = MambaSpec(16, shapes=((64, 3), (4, 8, 16)), dtypes=("bfloat16", "float32"))
EVERY_KIND = [FULL, WINDOW, CHUNK, MLA, SINK, CROSS, ENCODER, MAMBA]

LIMITS = EngineLimits(max_model_len=1000, max_num_batched_tokens=100)


@dataclass(frozen=True)
class TorchLike:
    itemsize: object


# -- bytes -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "page"),
    [
        (FULL, 2 * 16 * 8 * 128 * 2),
        (FullAttentionSpec(**HEADS, head_size_v=64), 16 * 8 * (128 + 64) * 2),
        (
            SlidingWindowSpec(**HEADS, head_size_v=64, sliding_window=9),
            16 * 8 * (128 + 64) * 2,
        ),
        (FullAttentionSpec(**HEADS | {"dtype": "float8_e4m3fn"}), 2 * 16 * 8 * 128),
        (FullAttentionSpec(**HEADS | {"dtype": TorchLike(4)}), 2 * 16 * 8 * 128 * 4),
        (FullAttentionSpec(**HEADS, page_size_padded=70000), 70000),
        (MLA, 16 * 576 * 2),
        (MLAAttentionSpec(**HEADS | {"block_size": 64, "num_kv_heads": 1,
            "head_size": 576}), 73728),
        (MLAAttentionSpec(**HEADS | {"block_size": 64, "num_kv_heads": 1,
            "head_size": 576}, cache_dtype_str="fp8_ds_mla"), 41984),
        (MAMBA, 64 * 3 * 2 + 4 * 8 * 16 * 4),
        (MambaSpec(1, ((4,),), ("float32",), page_size_padded=64), 64),
    ],
)  # fmt: skip
def test_page(spec: KVCacheSpec, page: int) -> None:
    assert spec.page_size_bytes == page


@pytest.mark.parametrize("spec", [spec for spec in EVERY_KIND if spec is not MAMBA])
def test_page_grows_with_the_block(spec: KVCacheSpec) -> None:
    larger = spec.copy_with_new_block_size(48 if spec is not SINK else 32)
    assert larger.page_size_bytes * 16 == spec.page_size_bytes * larger.block_size


def test_state_does_not_grow_with_the_block() -> None:
    assert MAMBA.copy_with_new_block_size(640).page_size_bytes == MAMBA.page_size_bytes


@pytest.mark.parametrize("spec", EVERY_KIND)
def test_specs_are_values(spec: KVCacheSpec) -> None:
    copy = pickle.loads(pickle.dumps(spec))
    assert copy == spec
    assert hash(copy) == hash(spec)
    with pytest.raises(AttributeError):
        spec.block_size = 1  # type: ignore[misc]


# -- blocks of a request -----------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "limits", "blocks"),
    [
        (FULL, {}, 63),
        (FULL, {"decode_context_parallel_size": 4}, 16),
        (FULL, {"prefill_context_parallel_size": 2}, 32),
        (MLA, {}, 63),
        (WINDOW, {}, 16),  # 227 tokens
        (WINDOW, {"max_model_len": 20}, 2),
        (WINDOW, {"max_model_len": 20, "vllm019_arithmetic": True}, 3),
        (WINDOW, {"max_concurrent_batches": 2}, 22),  # 327
        (WINDOW, {"num_lookahead_tokens": 20}, 17),  # 247
        (CHUNK, {}, 11),  # 163
        (CHUNK, {"max_num_batched_tokens": 97}, 10),  # 160
        (CHUNK, {"max_num_batched_tokens": 97, "vllm019_arithmetic": True}, 11),
        (CROSS, {"max_num_encoder_input_tokens": 1500}, 94),
        (ENCODER, {}, 0),
        (MAMBA, {}, 1),
        (MAMBA, {"mamba_cache_mode": "align"}, 2),
        (MAMBA, {"mamba_cache_mode": "all"}, 8),  # 7 of a step and one before
        (MAMBA, {"mamba_cache_mode": "all", "max_num_batched_tokens": 2000}, 63),
        (MAMBA, {"mamba_cache_mode": "all", "vllm019_arithmetic": True}, 63),
        (MambaSpec(16, ((4,),), ("int8",), num_speculative_blocks=3), {}, 4),
        (MambaSpec(16, ((4,),), ("int8",), mamba_cache_mode="all"), {}, 8),
    ],
)
def test_blocks_of_a_request(
    spec: KVCacheSpec, limits: dict[str, Any], blocks: int
) -> None:
    given_limits = EngineLimits(
        **{"max_model_len": 1000, "max_num_batched_tokens": 100} | limits
    )
    assert spec.max_blocks_per_request(given_limits) == blocks
    bytes_needed = spec.max_memory_usage_bytes(given_limits)
    assert bytes_needed == blocks * spec.page_size_bytes


def fullest(block_size: int, length: int, batch: int, kept_from: Any) -> int:
    """Blocks held at the worst moment of any way to cut a request into steps."""
    return max(
        -(-min(done + batch, length) // block_size) - kept_from(done) // block_size
        for done in range(length)
    )


SIZES = st.integers(1, 12)


@given(SIZES, st.integers(1, 90), st.integers(1, 20), st.integers(1, 30))
def test_window_is_what_the_worst_moment_holds(
    block_size: int, length: int, batch: int, window: int
) -> None:
    spec = SlidingWindowSpec(
        block_size, num_kv_heads=1, head_size=1, dtype="int8", sliding_window=window
    )
    limits = EngineLimits(max_model_len=length, max_num_batched_tokens=batch)
    held = fullest(block_size, length, batch, lambda done: max(0, done - window + 1))
    assert spec.max_blocks_per_request(limits) == held


@given(SIZES, st.integers(1, 90), st.integers(1, 20), st.integers(1, 30))
def test_chunk_is_what_the_worst_moment_holds(
    block_size: int, length: int, batch: int, chunk: int
) -> None:
    spec = ChunkedLocalAttentionSpec(
        block_size,
        num_kv_heads=1,
        head_size=1,
        dtype="int8",
        attention_chunk_size=chunk,
    )
    limits = EngineLimits(max_model_len=length, max_num_batched_tokens=batch)
    held = fullest(block_size, length, batch, lambda done: done // chunk * chunk)
    assert spec.max_blocks_per_request(limits) == held


@given(st.sampled_from(EVERY_KIND), st.integers(1, 3000), st.integers(1, 500))
def test_longer_requests_never_need_less(
    spec: KVCacheSpec, length: int, batch: int
) -> None:
    short, long = (
        EngineLimits(max_model_len=n, max_num_batched_tokens=batch)
        for n in (length, length + 1)
    )
    assert spec.max_blocks_per_request(short) <= spec.max_blocks_per_request(long)
    least = spec.min_blocks_per_request(short)
    assert least <= spec.max_blocks_per_request(short)


def test_windows_refuse_decode_context_parallelism() -> None:
    limits = EngineLimits(max_model_len=10, decode_context_parallel_size=2)
    with pytest.raises(ConfigError, match="DCP not support sliding window"):
        WINDOW.max_memory_usage_bytes(limits)


# -- merging -----------------------------------------------------------------------


def recorded(**sizes: int) -> FullAttentionSpec:
    return FullAttentionSpec(**HEADS, **sizes)


def test_full_layers_merge_and_carry_the_one_window() -> None:
    windowed = recorded(sliding_window=1024)
    assert FULL.merge([FULL, windowed, FULL]) == windowed


@pytest.mark.parametrize("spec", EVERY_KIND)
def test_equal_specs_merge(spec: KVCacheSpec) -> None:
    assert spec.merge([spec, spec]) == spec


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([FULL, WINDOW], "must be FullAttentionSpec"),
        ([FULL, MLA], "must be FullAttentionSpec"),
        ([MLA, FULL], "must be MLAAttentionSpec"),
        ([SINK, FULL], "the same sink"),
        ([FULL, SINK], "must be FullAttentionSpec"),
        ([WINDOW, CHUNK], "must be the same"),
        ([recorded(sliding_window=1), recorded(sliding_window=2)], "same window size"),
        (
            [recorded(sliding_window=1), recorded(attention_chunk_size=2)],
            "sliding window layers and chunked local attention layers",
        ),
        ([FULL, recorded(head_size_v=64)], "the same attention spec"),
        (
            [MLA, MLAAttentionSpec(**HEADS, cache_dtype_str="fp8_ds_mla")],
            "same quantization method",
        ),
        ([MLA, MLAAttentionSpec(**HEADS)], "the same attention spec"),
    ],
)
def test_what_does_not_merge(specs: list[KVCacheSpec], message: str) -> None:
    with pytest.raises(NotMergeableError, match=message):
        specs[0].merge(specs)


# -- one kind ----------------------------------------------------------------------


def test_layers_of_one_kind_are_one_spec() -> None:
    narrow = FullAttentionSpec(**HEADS | {"num_kv_heads": 2})
    specs = {"a": FULL, "b": narrow, "c": MLA}
    uniform = UniformTypeKVCacheSpecs.from_specs(specs)
    assert uniform is not None
    pages = FULL.page_size_bytes + narrow.page_size_bytes + MLA.page_size_bytes
    assert uniform.page_size_bytes == pages
    assert uniform.max_memory_usage_bytes(LIMITS) == 63 * pages
    specs.clear()
    assert list(uniform.kv_cache_specs) == ["a", "b", "c"]
    again = UniformTypeKVCacheSpecs(16, dict(reversed(uniform.kv_cache_specs.items())))
    assert again == uniform
    assert hash(again) == hash(uniform)


@pytest.mark.parametrize(
    "other",
    [
        WINDOW,
        SINK,
        FullAttentionSpec(**HEADS | {"block_size": 32}),
    ],
)
def test_layers_of_several_kinds_are_not(other: KVCacheSpec) -> None:
    assert UniformTypeKVCacheSpecs.from_specs({"a": FULL, "b": other}) is None
    with pytest.raises(ConfigError, match="layers of one kind"):
        UniformTypeKVCacheSpecs(16, {"a": FULL, "b": other})


def test_states_kept_otherwise_are_another_kind() -> None:
    kept = {
        mode: MambaSpec(16, ((4,),), ("int8",), mamba_cache_mode=mode)
        for mode in MAMBA_CACHE_MODES
    }
    wide = MambaSpec(16, ((8,),), ("int8",), mamba_cache_mode="all")
    for mode, spec in kept.items():
        uniform = UniformTypeKVCacheSpecs.from_specs({"a": spec, "b": wide})
        assert (uniform is not None) is (mode == "all")


def test_no_layers_are_no_spec() -> None:
    assert UniformTypeKVCacheSpecs.from_specs({}) is None


@dataclass(frozen=True)
class Foreign(KVCacheSpec):
    """A kind that a plugin brings: only equal ones go together."""

    @property
    def real_page_size_bytes(self) -> int:
        return 10

    def max_blocks_per_request(self, limits: EngineLimits) -> int:
        return 1


def test_foreign_kinds_go_together_only_if_equal() -> None:
    assert UniformTypeKVCacheSpecs.is_uniform_type({"a": Foreign(1), "b": Foreign(1)})
    assert not UniformTypeKVCacheSpecs.is_uniform_type({"a": Foreign(1), "b": FULL})


# -- refusals ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: FullAttentionSpec(**HEADS | {"block_size": 0}), "block_size"),
        (lambda: FullAttentionSpec(**HEADS | {"block_size": True}), "block_size"),
        (lambda: FullAttentionSpec(**HEADS | {"num_kv_heads": 0}), "num_kv_heads"),
        (lambda: FullAttentionSpec(**HEADS | {"head_size": -1}), "head_size"),
        (lambda: FullAttentionSpec(**HEADS, head_size_v=-1), "head_size_v"),
        (lambda: recorded(sliding_window=0), "sliding_window"),
        (lambda: recorded(attention_chunk_size=0), "attention_chunk_size"),
        (lambda: FullAttentionSpec(**HEADS, page_size_padded=9), "page_size_padded"),
        (lambda: SlidingWindowSpec(**HEADS, sliding_window=0), "sliding_window"),
        (
            lambda: ChunkedLocalAttentionSpec(**HEADS, attention_chunk_size=0),
            "attention_chunk_size",
        ),
        (lambda: SinkFullAttentionSpec(**HEADS, sink_len=20), "sink_len"),
        (lambda: SinkFullAttentionSpec(**HEADS, sink_len=-16), "sink_len"),
        (lambda: MLAAttentionSpec(**HEADS, head_size_v=64), "head_size_v"),
        (lambda: MambaSpec(16, (), ()), "shapes"),
        (lambda: MambaSpec(16, ((0,),), ("int8",)), "shapes"),
        (lambda: MambaSpec(16, ((1,), (2,)), ("int8",)), "dtypes"),
        (lambda: MambaSpec(16, ((8,),), ("int8",), 4), "page_size_padded"),
        (
            lambda: MambaSpec(16, ((8,),), ("int8",), mamba_cache_mode="al"),
            "mamba_cache_mode",
        ),
        (
            lambda: MambaSpec(16, ((8,),), ("int8",), num_speculative_blocks=-1),
            "num_speculative_blocks",
        ),
        (lambda: UniformTypeKVCacheSpecs(8, {"a": FULL}), "block_size"),
        (lambda: UniformTypeKVCacheSpecs(8, {}), "kv_cache_specs"),
        (lambda: EngineLimits(max_model_len=0), "max_model_len"),
        (lambda: EngineLimits(max_model_len=1, mamba_cache_mode="x"), "mamba_cache"),
    ],
)
def test_refusals_name_the_field(make: Any, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        make()


def test_no_sink_is_a_sink_of_no_tokens() -> None:
    given_none: Any = None
    assert SinkFullAttentionSpec(**HEADS, sink_len=given_none).sink_len == 0


def test_padding_may_become_too_small() -> None:
    spec = FullAttentionSpec(**HEADS, page_size_padded=FULL.page_size_bytes)
    with pytest.raises(ConfigError, match="page_size_padded"):
        spec.copy_with_new_block_size(32)


@pytest.mark.parametrize("dtype", ["bfloat61", TorchLike("2"), TorchLike(0), 3])
def test_unknown_dtypes_are_refused(dtype: Any) -> None:
    with pytest.raises(KVPluginError, match="dtype"):
        dtype_bytes(dtype)


def test_unknown_dtype_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean 'bfloat16'.*float8_e4m3fn"):
        FullAttentionSpec(**HEADS | {"dtype": "bfloat61"})


# -- zeroing -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("specs", "zeroing"),
    [
        ([FULL], False),
        ([FULL, WINDOW], False),
        ([FULL, MAMBA], True),
        ([FULL, SlidingWindowSpec(**HEADS | {"dtype": "uint8"}, sliding_window=1)],
         True),
        ([UniformTypeKVCacheSpecs(16, {"a": MAMBA})], True),
    ],
)  # fmt: skip
def test_which_caches_are_zeroed(specs: list[KVCacheSpec], zeroing: bool) -> None:
    groups = [KVCacheGroupSpec([f"layer{i}"], s) for i, s in enumerate(specs)]
    config = KVCacheConfig(2, [], groups)
    assert config.needs_kv_cache_zeroing is zeroing
    assert config.has_mamba_layers is any(
        not isinstance(spec, AttentionSpec) for spec in specs
    )
