"""The kinds of layers, one file a kind of memory."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from kvplugin.integration.reference.config import Kind, LayerConfig, ModelConfig
from kvplugin.integration.reference.layers.base import (
    CacheSettings,
    LayerParts,
    Memory,
    Mixer,
    Shard,
    WeightShape,
)
from kvplugin.integration.reference.layers.cross import CrossLayer
from kvplugin.integration.reference.layers.encoder import EncoderLayer
from kvplugin.integration.reference.layers.mla import MLALayer
from kvplugin.integration.reference.layers.recurrent import RecurrentLayer
from kvplugin.integration.reference.layers.softmax import SoftmaxLayer


class KindOfLayer(NamedTuple):
    """How a kind is built."""

    make: Callable[[LayerParts], Mixer]
    weight_shapes: Callable[[ModelConfig, LayerConfig], dict[str, WeightShape]]


_SOFTMAX: Final = KindOfLayer(SoftmaxLayer, SoftmaxLayer.weight_shapes)
_MLA: Final = KindOfLayer(MLALayer, MLALayer.weight_shapes)
KINDS: Final[Mapping[Kind, KindOfLayer]] = MappingProxyType(
    {
        "full": _SOFTMAX,
        "sliding_window": _SOFTMAX,
        "chunked_local": _SOFTMAX,
        "sink": _SOFTMAX,
        "mla": _MLA,
        "mla_fp8": _MLA,
        "cross": KindOfLayer(CrossLayer, CrossLayer.weight_shapes),
        "encoder_only": KindOfLayer(EncoderLayer, EncoderLayer.weight_shapes),
        "recurrent": KindOfLayer(RecurrentLayer, RecurrentLayer.weight_shapes),
    }
)
"""Kind -> how its layers are made."""

__all__ = [
    "KINDS",
    "CacheSettings",
    "KindOfLayer",
    "LayerParts",
    "Memory",
    "Mixer",
    "Shard",
    "WeightShape",
]
