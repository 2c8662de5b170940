"""What a layer is to the engine, and what it is made of."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, NamedTuple, Protocol

import torch

from kvplugin.errors import ConfigError
from kvplugin.integration.reference.config import LayerConfig, ModelConfig
from kvplugin.integration.reference.history import Spans, Tensors
from kvplugin.layout import head_slices
from kvplugin.spec import KVCacheSpec

Split = Literal["heads", "kv_heads", "intermediate"]


class Memory(StrEnum):
    """What a layer keeps of the tokens that it has seen."""

    KEYS_AND_VALUES = "keys and values"
    LATENTS = "latents"
    RECORDS = "latents as records of 656 bytes"
    ENCODER = "keys and values of the encoder's tokens"
    STATES = "recurrent states"
    NOTHING = "nothing"


class WeightShape(NamedTuple):
    """A weight of the whole model; what ranks share is split along the first axis."""

    shape: tuple[int, ...]
    split: Split | None = None
    fan_in: int = 0
    """Elements that are summed up; 0 for weights that scale and start as ones."""
    is_output: bool = False
    """Whether it makes what is added to the hidden states."""


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """What an engine decides about all caches."""

    block_size: int = 16
    dtype: str | None = None
    """None for the model's."""
    mamba_cache_mode: str = "none"
    mamba_block_size: int = 1 << 20
    num_drafts: int = 0


@dataclass(frozen=True)
class Shard:
    """The part of the model that one tensor-parallel rank has."""

    config: ModelConfig
    rank: int = 0
    ranks: int = 1

    def part(self, split: Split | None) -> slice:
        """Of a weight's first axis.

        Raises:
            ConfigError: the ranks cannot share it evenly.
        """
        if split is None:
            return slice(None)
        if split == "kv_heads":  # with fewer heads than ranks, some have the same
            ((_, heads),) = head_slices(
                self.config.num_kv_heads, 1, self.ranks, self.rank
            )
            return slice(heads.source_first, heads.source_first + heads.num_heads)
        key = "num_heads" if split == "heads" else "intermediate_size"
        size = getattr(self.config, key)
        if size % self.ranks:
            raise ConfigError(
                f"tensor_parallel_size {self.ranks} does not divide {key} {size}"
            )
        each = size // self.ranks
        return slice(self.rank * each, (self.rank + 1) * each)

    def size(self, split: Split) -> int:
        """Of that part."""
        part = self.part(split)
        return int(part.stop - part.start)

    def kv_head_of_each_query_head(self) -> list[int]:
        """Of this rank's query heads the key head that each reads, as the rank counts
        its own."""
        heads, first = self.part("heads"), self.part("kv_heads").start
        group = self.config.num_heads // self.config.num_kv_heads
        return [head // group - first for head in range(heads.start, heads.stop)]


@dataclass(frozen=True, eq=False)
class LayerParts:
    """What a layer is built from."""

    number: int
    layer: LayerConfig
    shard: Shard
    cache: CacheSettings
    weights: Mapping[str, torch.Tensor]
    """Its own, of this rank, by the names of its `weight_shapes`."""
    prefix: str = "layers"

    @property
    def name(self) -> str:
        """Unique in the model."""
        return f"{self.prefix}.{self.number}"

    @property
    def kv_sharing_target(self) -> str | None:
        """The layer whose cache it uses."""
        shares = self.layer.shares
        return None if shares is None else f"{self.prefix}.{shares}"

    @property
    def cache_dtype(self) -> str:
        """Of rows that are kept."""
        return self.cache.dtype or self.shard.config.dtype


class MixerBase:
    """What layers of all kinds have.

    Args:
        parts: what it is made of.
    """

    memory = Memory.NOTHING

    def __init__(self, parts: LayerParts) -> None:
        self.name = parts.name
        self.kv_sharing_target = parts.kv_sharing_target
        self._parts = parts
        self._config = parts.shard.config
        self._weights = parts.weights

    def sink_rows(self) -> Tensors:
        """None."""
        return ()


class Mixer(Protocol):
    """The part of a decoder layer that mixes tokens; a `worker.collect.KVLayer`."""

    @property
    def name(self) -> str:
        """Unique in the model."""

    @property
    def kv_sharing_target(self) -> str | None:
        """The layer whose cache it uses in place of one of its own."""

    @property
    def memory(self) -> Memory:
        """What its history keeps."""

    def kv_cache_spec(self) -> KVCacheSpec | None:
        """Its cache on one rank; None if it has none."""

    def sink_rows(self) -> Tensors:
        """Rows that all requests share, on this rank; empty for none."""

    def mix(
        self, x: torch.Tensor, positions: torch.Tensor, spans: Spans, history: Any
    ) -> torch.Tensor:
        """This rank's part of the output: the ranks' parts are summed.

        Args:
            x: normalised hidden states [tokens, hidden].
            positions: int64 [tokens], of each token in its request.
            spans: the requests.
            history: a `TokenHistory` or a `StateHistory`, as the kind needs.
        """
