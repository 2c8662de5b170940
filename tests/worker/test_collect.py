"""Layers become groups, and layers that share end where their target is."""

from dataclasses import dataclass
from typing import Any

import pytest

from kvplugin.errors import ConfigError
from kvplugin.groups import GroupingConfig
from kvplugin.spec import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from kvplugin.worker.collect import collect_layers, group_layers

HEADS: dict[str, Any] = {"num_kv_heads": 2, "head_size": 8, "dtype": "bfloat16"}
FULL = FullAttentionSpec(block_size=16, **HEADS)
WINDOW = SlidingWindowSpec(block_size=16, sliding_window=32, **HEADS)
CONFIG = GroupingConfig(max_model_len=128)


@dataclass
class Layer:
    """A layer of some engine."""

    name: str
    spec: KVCacheSpec | None = None
    kv_sharing_target: str | None = None

    def kv_cache_spec(self) -> KVCacheSpec | None:
        assert self.kv_sharing_target is None
        return self.spec


def test_layers_are_asked_in_order() -> None:
    layers = [
        Layer("b", FULL),
        Layer("pooling"),
        Layer("a", WINDOW),
        Layer("c", None, "b"),
    ]
    collected = collect_layers(layers)
    assert list(collected.specs.items()) == [("b", FULL), ("a", WINDOW)]
    assert collected.kv_sharing_targets == {"c": "b"}


def test_sharing_layers_end_in_the_group_of_their_target() -> None:
    layers = [
        Layer("full.0", FULL),
        Layer("window.0", WINDOW),
        Layer("shares.full", None, "full.0"),
        Layer("shares.window", None, "window.0"),
        Layer("shares.a.sharing.layer", None, "shares.window"),
    ]
    groups = group_layers(layers, CONFIG)
    assert [group.layer_names for group in groups] == [
        ("full.0", "shares.full"),
        ("window.0", "shares.window", "shares.a.sharing.layer"),
    ]
    assert [group.own_layer_names for group in groups] == [("full.0",), ("window.0",)]
    assert groups[1].kv_sharing_targets["shares.a.sharing.layer"] == "window.0"


def test_no_layers_no_groups() -> None:
    assert group_layers([Layer("pooling")], CONFIG) == []


def test_a_target_that_does_not_exist() -> None:
    layers = [Layer("full.0", FULL), Layer("b", None, "full.O")]
    with pytest.raises(ConfigError, match=r"layer 'full\.O'.*mean 'full\.0'"):
        group_layers(layers, CONFIG)


def test_a_target_without_a_cache() -> None:
    layers = [Layer("full.0", FULL), Layer("pooling"), Layer("b", None, "pooling")]
    with pytest.raises(ConfigError, match="unknown layer 'pooling'"):
        group_layers(layers, CONFIG)


def test_targets_in_a_circle() -> None:
    layers = [Layer("full.0", FULL), Layer("a", None, "b"), Layer("b", None, "a")]
    with pytest.raises(ConfigError, match="circle: a -> b -> a"):
        group_layers(layers, CONFIG)


@pytest.mark.parametrize("second", [Layer("a", FULL), Layer("a", None, "b")])
def test_two_layers_of_one_name(second: Layer) -> None:
    with pytest.raises(ConfigError, match="two layers are called 'a'"):
        group_layers([Layer("a", FULL), Layer("b", FULL), second], CONFIG)
