"""Cross-attention: queries of the decoder, keys and values of the encoder's input.

The encoder of this toy is the embedding of its tokens. Their rows are written once, in
the step in which the request has nothing computed yet.
"""

import torch

from kvplugin.errors import ConfigError
from kvplugin.integration.reference.config import LayerConfig, ModelConfig
from kvplugin.integration.reference.history import Spans, TokenHistory
from kvplugin.integration.reference.layers.base import (
    LayerParts,
    Memory,
    MixerBase,
    WeightShape,
)
from kvplugin.integration.reference.layers.softmax import (
    SoftmaxLayer,
    attend,
    project,
    unproject,
)
from kvplugin.spec import CrossAttentionSpec, KVCacheSpec


class CrossLayer(MixerBase):
    """Grouped heads over the encoder's tokens, without positions.

    Args:
        parts: what it is made of.
    """

    memory = Memory.ENCODER

    def __init__(self, parts: LayerParts) -> None:
        super().__init__(parts)
        self._kv_head = parts.shard.kv_head_of_each_query_head()

    @staticmethod
    def weight_shapes(
        config: ModelConfig, layer: LayerConfig
    ) -> dict[str, WeightShape]:
        """As of self-attention."""
        return SoftmaxLayer.weight_shapes(config, layer)

    def kv_cache_spec(self) -> KVCacheSpec:
        """The encoder's tokens."""
        return CrossAttentionSpec(
            block_size=self._parts.cache.block_size,
            num_kv_heads=self._parts.shard.size("kv_heads"),
            head_size=self._config.head_size,
            head_size_v=self._parts.layer.head_size_v,
            dtype=self._parts.cache_dtype,
        )

    def mix(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        spans: Spans,
        history: TokenHistory,
    ) -> torch.Tensor:
        """See `Mixer.mix`.

        Raises:
            ConfigError: a request has no encoder input.
        """
        del positions
        inputs = [span.encoder for span in spans]
        if any(rows is None for rows in inputs):
            raise ConfigError(
                f"layer {self.name} is cross-attention: give every request "
                "encoder_token_ids"
            )
        new = [s.encoder for s in spans if not s.num_computed and s.encoder is not None]
        if new:
            rows = torch.cat(new)
            history.append(
                project(rows, self._weights["k"]), project(rows, self._weights["v"])
            )
        query = project(x, self._weights["q"])
        scale, outputs = self._config.head_size**-0.5, []
        for index, span in enumerate(spans):
            key, value = history.read(index, 0)
            key, value = key[:, self._kv_head], value[:, self._kv_head]
            outputs.append(attend(query[span.rows], key, value, None, scale))
        return unproject(torch.cat(outputs), self._weights["o"])
