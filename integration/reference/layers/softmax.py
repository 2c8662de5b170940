"""Attention over keys and values: full, windows, chunks, and sinks.

The kinds differ in which tokens a query may see, which is data (`Sight`), and in what
of it is kept, which is their KV cache spec.
"""

from dataclasses import dataclass
from typing import Any

import torch

from kvplugin.integration.reference.config import LayerConfig, ModelConfig
from kvplugin.integration.reference.history import Spans, Tensors, TokenHistory
from kvplugin.integration.reference.layers.base import (
    LayerParts,
    Memory,
    MixerBase,
    WeightShape,
)
from kvplugin.integration.reference.layers.rope import rotate
from kvplugin.spec import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)


@dataclass(frozen=True, slots=True)
class Sight:
    """Which tokens a query may see; 0 sets no bound."""

    window: int = 0
    chunk: int = 0

    def first(self, position: int) -> int:
        """The first token that a query at this position sees."""
        first = max(position - self.window + 1, 0) if self.window else 0
        return max(first, position // self.chunk * self.chunk) if self.chunk else first

    def mask(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """bool [queries, keys] of positions: whether the key is seen."""
        q, k = queries[:, None], keys[None, :]
        seen = k <= q
        if self.window:
            seen &= k > q - self.window
        if self.chunk:
            seen &= k >= q // self.chunk * self.chunk
        return seen


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Softmax attention, one key head for each query head.

    Args:
        query: [queries, heads, dim].
        key: [keys, heads, dim].
        value: [keys, heads, value dim].
        seen: bool [queries, keys], at least one a query; None: everything.
        scale: of the products.

    Returns:
        [queries, heads, value dim].
    """
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    if seen is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)


class SoftmaxLayer(MixerBase):
    """Keys and values of every token, in grouped heads.

    Args:
        parts: what it is made of.
    """

    memory = Memory.KEYS_AND_VALUES

    def __init__(self, parts: LayerParts) -> None:
        super().__init__(parts)
        self._sight = Sight(parts.layer.window, parts.layer.chunk)
        self._kv_head = parts.shard.kv_head_of_each_query_head()

    @staticmethod
    def weight_shapes(
        config: ModelConfig, layer: LayerConfig
    ) -> dict[str, WeightShape]:
        """Its weights, heads first; none for keys where the cache is another's."""
        hidden, size = config.hidden_size, config.head_size
        value = layer.head_size_v or size
        shapes = {
            "q": WeightShape((config.num_heads, size, hidden), "heads", hidden),
            "o": WeightShape(
                (config.num_heads, value, hidden),
                "heads",
                config.num_heads * value,
                is_output=True,
            ),
        }
        heads = config.num_kv_heads
        if layer.shares is None:
            shapes["k"] = WeightShape((heads, size, hidden), "kv_heads", hidden)
            shapes["v"] = WeightShape((heads, value, hidden), "kv_heads", hidden)
        if layer.sink_len and layer.shares is None:
            for name, dim in (("sink_k", size), ("sink_v", value)):
                shapes[name] = WeightShape((heads, layer.sink_len, dim), "kv_heads", 1)
        return shapes

    def kv_cache_spec(self) -> KVCacheSpec:
        """By kind."""
        parts, layer = self._parts, self._parts.layer
        common: dict[str, Any] = {
            "block_size": parts.cache.block_size,
            "num_kv_heads": parts.shard.size("kv_heads"),
            "head_size": self._config.head_size,
            "head_size_v": layer.head_size_v,
            "dtype": parts.cache_dtype,
        }
        if layer.window:
            return SlidingWindowSpec(sliding_window=layer.window, **common)
        if layer.chunk:
            return ChunkedLocalAttentionSpec(attention_chunk_size=layer.chunk, **common)
        if layer.sink_len:
            return SinkFullAttentionSpec(sink_len=layer.sink_len, **common)
        return FullAttentionSpec(**common)

    def sink_rows(self) -> Tensors:
        """Keys and values [sink tokens, heads, dim] that every request shares."""
        if "sink_k" not in self._weights:
            return ()
        return tuple(self._weights[n].transpose(0, 1) for n in ("sink_k", "sink_v"))

    def mix(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        spans: Spans,
        history: TokenHistory,
    ) -> torch.Tensor:
        """See `Mixer.mix`."""
        theta = self._config.rope_theta
        query = rotate(project(x, self._weights["q"]), positions, theta)
        if self.kv_sharing_target is None:
            key = rotate(project(x, self._weights["k"]), positions, theta)
            history.append(key, project(x, self._weights["v"]))
        outputs = [
            self._attend(query[span.rows], positions[span.rows], index, history)
            for index, span in enumerate(spans)
        ]
        return unproject(torch.cat(outputs), self._weights["o"])

    def _attend(
        self,
        query: torch.Tensor,
        positions: torch.Tensor,
        index: int,
        history: TokenHistory,
    ) -> torch.Tensor:
        """The queries of one request."""
        first = self._sight.first(int(positions[0]))
        key, value = history.read(index, first)
        keys = torch.arange(first, first + len(key), device=positions.device)
        seen = self._sight.mask(positions, keys)
        if self._parts.layer.sink_len:
            sink_key, sink_value = history.read_sink()
            key, value = torch.cat([sink_key, key]), torch.cat([sink_value, value])
            always = seen.new_ones(len(positions), len(sink_key))
            seen = torch.cat([always, seen], dim=1)
        scale = self._config.head_size**-0.5
        heads = self._kv_head
        return attend(query, key[:, heads], value[:, heads], seen, scale)


def project(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[tokens, hidden] and [heads, dim, hidden] make [tokens, heads, dim]."""
    return torch.einsum("tm,hdm->thd", x, weight)


def unproject(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, dim] and [heads, dim, hidden] make [tokens, hidden]."""
    return torch.einsum("thd,hdm->tm", x, weight)
