"""Layers from a config.json."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplugin.errors import ConfigError
from kvplugin.plan import CacheOptions, layers_of, load_model
from kvplugin.replay import Replay, ReplaySettings
from kvplugin.replay.model_families import DEFAULTS, WINDOW_EVERYWHERE
from kvplugin.replay.model_file import read_model
from tests.replay.traces import make_trace

PLAIN = {"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 256}
WINDOW = {**PLAIN, "sliding_window": 128}
OTHER_KEYS = (
    "layer_types",
    "head_dim",
    "kv_lora_rank",
    "attention_chunk_size",
    "no_rope_layers",
    "max_window_layers",
)


def written(folder: Path, content: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        (PLAIN, "ffff"),
        *(
            ({**WINDOW, "model_type": name}, "ssss")
            for name in sorted(WINDOW_EVERYWHERE)
        ),
        ({**PLAIN, "model_type": "mistral", "sliding_window": None}, "ffff"),
        ({**WINDOW, "use_sliding_window": False}, "ffff"),
        ({**WINDOW, "model_type": "qwen2"}, "ffff"),
        ({**WINDOW, "use_sliding_window": True, "max_window_layers": 3}, "fffs"),
        ({**PLAIN, "model_type": "gemma2"}, "sfsf"),
        ({**PLAIN, "model_type": "gemma2", "sliding_window": None}, "ffff"),
        (
            {
                "model_type": "gemma3",
                "text_config": {"num_hidden_layers": 7, "hidden_size": 256},
            },
            "sssssfs",
        ),
        ({**PLAIN, "model_type": "gpt_oss"}, "sfsf"),
        ({**PLAIN, "model_type": "cohere2"}, "sssf"),
        ({**PLAIN, "model_type": "olmo3"}, "sssf"),
        ({**PLAIN, "model_type": "llama4", "no_rope_layers": []}, "cccf"),
        (
            {**PLAIN, "model_type": "llama4_text", "no_rope_layers": [1, 0, 0, 1]},
            "cffc",
        ),
        ({**PLAIN, "model_type": "llama4", "attention_chunk_size": None}, "ffff"),
        ({**WINDOW, "sliding_window_pattern": 2}, "sfsf"),
        (
            {**WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2},
            "sfsf",
        ),
        ({**PLAIN, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, "mmmm"),
        (
            {
                **PLAIN,
                "attention_chunk_size": 64,
                "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
            },
            "cccf",
        ),
        ({"model_type": "both", "text_config": PLAIN, "vision_config": {}}, "ffff"),
    ],
)
def test_kinds(tmp_path: Path, config: dict[str, Any], kinds: str) -> None:
    layers = layers_of(read_model(written(tmp_path, config)), CacheOptions())
    assert "".join(name.split(".")[2][0] for name in layers) == kinds


@pytest.mark.parametrize(
    "name", ["llama-3.1-8b", "gpt-oss-20b", "mistral-7b-v0.1", "qwen3-8b"]
)
def test_agrees_with_the_known_models(tmp_path: Path, name: str) -> None:
    known = load_model(name)
    specs = layers_of(known, CacheOptions())
    config = {
        "model_type": "mistral",
        "num_attention_heads": 1,
        **known.config,
        "num_hidden_layers": len(specs),
        "sliding_window": next(
            (kind.facts["window"] for kind in known.layers if "window" in kind.facts),
            None,
        ),
    }
    if len(known.layers) > 1:
        types = {"full": "full_attention", "slid": "sliding_attention"}
        config["layer_types"] = [types[key.split(".")[2][:4]] for key in specs]
    read = layers_of(read_model(written(tmp_path, config)), CacheOptions())
    assert read == specs


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([], "Expected `object`"),
        ({}, "num_hidden_layers"),
        ({**PLAIN, "num_hidden_layers": 0}, ">= 1"),
        ({**PLAIN, "layer_types": ["linear_attention"]}, "unknown layer type"),
        ({**PLAIN, "layer_types": ["sliding_attention"] * 4}, "without their size"),
        ({**PLAIN, "layer_types": ["full_attention"]}, "1 layer_types for 4"),
        ({**PLAIN, "mamba_d_state": 16}, "recurrent states"),
        (
            {**PLAIN, "kv_lora_rank": 512, "linear_attn_config": {"kda_layers": [1]}},
            "linear_attn_config: .*recurrent states",
        ),
        (WINDOW, "sliding_window, but not which layers.*: add layer_types or"),
        ({**WINDOW, "use_sliding_window": True}, "sliding_window, but not which"),
        ({**PLAIN, "attention_chunk_size": 64}, "attention_chunk_size, but not which"),
        (
            {**PLAIN, "model_type": "llama4", "no_rope_layers": [1]},
            "1 no_rope_layers for 4 layers",
        ),
        ({**PLAIN, "hidden_size": None}, "head_dim, or a hidden_size of 8"),
        ({**PLAIN, "hidden_size": 4}, "head_dim, or a hidden_size of 8"),
        ({"text_config": None}, "Expected `object`, got `null`"),
    ],
)
def test_refusals(tmp_path: Path, config: Any, message: str) -> None:
    path = written(tmp_path, config)
    with pytest.raises(ConfigError, match=message) as caught:
        read_model(path)
    assert str(path) in str(caught.value)
    with pytest.raises(ConfigError, match="No such file"):
        read_model(tmp_path / "none.json")


@pytest.mark.parametrize("family", [*DEFAULTS, *sorted(WINDOW_EVERYWHERE)])
def test_every_family_is_read(tmp_path: Path, family: str) -> None:
    config = {**PLAIN, "model_type": family}
    assert layers_of(read_model(written(tmp_path, config)), CacheOptions())


def test_replay_serves_its_groups(tmp_path: Path) -> None:
    config = {**WINDOW, "sliding_window_pattern": 2}
    rules = ReplaySettings(capacities=(1,), model=str(written(tmp_path, config)))
    made = Replay(make_trace([[1, 2], [1, 2]]), rules)
    assert len(made.served.groups) == 2
    assert made.run("lru", 20).counts.hit_blocks == 2


@settings(max_examples=60, deadline=None)
@given(
    st.fixed_dictionaries(
        {},
        optional=dict.fromkeys(
            (*WINDOW, *OTHER_KEYS, "text_config"),
            st.none() | st.integers(-2, 4) | st.text() | st.lists(st.text()),
        )
        | {"model_type": st.sampled_from([*DEFAULTS, *WINDOW_EVERYWHERE, "", 5])},
    )
)
def test_damage_is_a_config_error(
    tmp_path_factory: pytest.TempPathFactory, config: dict[str, Any]
) -> None:
    path = written(tmp_path_factory.getbasetemp(), {**WINDOW, **config})
    try:
        model = read_model(path)
    except ConfigError:
        return
    assert model.layers
