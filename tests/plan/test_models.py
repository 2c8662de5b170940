"""The models of the data file: their layers, and bytes computed apart from our code."""

import json
from importlib.resources import files

import pytest

from kvplugin.errors import ConfigError
from kvplugin.plan import CacheOptions, layers_of, load_model, load_models, state_shapes
from kvplugin.spec import FullAttentionSpec, MambaSpec, SlidingWindowSpec

MODELS = load_models()
STATELESS = {"mlp"}


def test_there_are_23_models_and_each_has_sources() -> None:
    assert len(MODELS) == 23
    assert all(model.sources for model in MODELS.values())


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_that_caches_has_a_spec(name: str) -> None:
    model = MODELS[name]
    total = model.config["num_hidden_layers"]
    assert sum(layer.count for layer in model.layers) == total
    caching = sum(
        layer.count * (2 if layer.kind == "sparse_mla" else 1)
        for layer in model.layers
        if layer.kind not in STATELESS
    )
    specs = layers_of(model, CacheOptions())
    assert len(specs) == caching
    for layer in model.layers:
        assert len(layer.indices) in (0, layer.count)
        for index in layer.indices:
            assert (layer.kind in STATELESS) or f"layers.{index}.{layer.kind}" in specs


@pytest.mark.parametrize("name", MODELS)
def test_bytes_equal_those_computed_apart(name: str) -> None:
    model = MODELS[name]
    specs = layers_of(model, CacheOptions())
    growing = sum(
        spec.page_size_bytes // spec.block_size
        for layer, spec in specs.items()
        if isinstance(spec, FullAttentionSpec) and "indexer" not in layer
    )
    windowed = sum(
        spec.page_size_bytes
        // spec.block_size
        * (
            spec.sliding_window
            if isinstance(spec, SlidingWindowSpec)
            else getattr(spec, "attention_chunk_size", 0)
        )
        for spec in specs.values()
        if not isinstance(spec, FullAttentionSpec | MambaSpec)
    )
    states = sum(
        spec.page_size_bytes for spec in specs.values() if isinstance(spec, MambaSpec)
    )
    indexer = sum(
        spec.page_size_bytes // spec.block_size
        for layer, spec in specs.items()
        if "indexer" in layer
    )
    key = "recurrent_state_bytes_per_sequence_conv_bf16_ssm_fp32"
    assert model.derived["growing_bytes_per_token_bf16"] == growing
    assert model.derived.get("windowed_bytes_per_full_sequence_bf16", 0) == windowed
    assert model.derived.get(key, 0) == states
    assert model.derived.get("indexer_bytes_per_token_fp8_with_scale", 0) == indexer


def test_figures_that_others_published() -> None:
    """From the data file's cross-checks."""
    growing = {
        name: MODELS[name].derived["growing_bytes_per_token_bf16"] for name in MODELS
    }
    assert growing["llama-3.1-70b"] * 1_000_000 == 327_680_000_000
    assert growing["deepseek-v3"] * 4096 == 287_834_112
    assert growing["minimax-m2"] == 248 * 1024
    nemotron = MODELS["nemotron-h-8b"]
    conv, ssm = state_shapes("mamba2", nemotron.config)
    assert conv[0] * conv[1] + ssm[0] * ssm[1] * ssm[2] == 1_079_296
    sparse = layers_of(
        MODELS["deepseek-v3.2"], CacheOptions(cache_dtype_str="fp8_ds_mla")
    )
    assert sparse["layers.0.sparse_mla"].page_size_bytes == 16 * 656


def test_tensor_parallel_ranks_share_heads_and_states() -> None:
    one, four = (
        layers_of(MODELS["qwen3-next-80b"], CacheOptions(tensor_parallel_size=ranks))
        for ranks in (1, 4)
    )
    attention, state = "layers.3.full_attention", "layers.0.gated_deltanet"
    # Two KV heads on four ranks: each keeps one.
    assert four[attention].page_size_bytes * 2 == one[attention].page_size_bytes
    assert four[state].page_size_bytes * 4 == one[state].page_size_bytes


def test_groups_of_a_state_are_replicated_where_ranks_do_not_divide_them() -> None:
    config = MODELS["bamba-9b"].config
    (channels, _), _ = state_shapes("mamba2", config, 4)
    assert channels == (128 * 64 + 2 * 4 * 128) // 4


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("llama-3.1-8b", {"tensor_parallel_size": 3}, "8 KV heads.*size 3"),
        ("minimax-m1", {"tensor_parallel_size": 128}, "state of 64"),
        ("deepseek-v3", {"cache_dtype_str": "fp8_ds_mla"}, "sparse MLA only"),
    ],
)
def test_what_cannot_be_is_refused(
    model: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        layers_of(MODELS[model], CacheOptions(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [{"block_size": 0}, {"mamba_cache_mode": "al"}, {"tensor_parallel_size": 0}],
)
def test_impossible_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        CacheOptions(**options)  # type: ignore[arg-type]


def test_unknown_models_are_refused() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'gpt-oss-20b'"):
        load_model("gpt-oss-20")
    with pytest.raises(ConfigError, match="unknown recurrent layer 'rwkv'"):
        state_shapes("rwkv", {})


def test_the_data_file_speaks_of_models_only() -> None:
    text = files("kvplugin.plan").joinpath("data/models.json").read_text("utf-8")
    assert set(json.loads(text)) == {"_readme", "models"}
    for word in ("/work", "/tmp", "find_string", "mkmodels", "session"):
        assert word not in text
