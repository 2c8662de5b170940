"""Multi-head latent attention: one latent a token, which all heads read.

Keys and values are never unfolded: queries go to the latent's space and outputs come
back from it (DeepSeek-V2, section 2.1, with the matrices absorbed).
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
from kvplugin.integration.reference.layers.norm import rms_norm
from kvplugin.integration.reference.layers.rope import rotate
from kvplugin.integration.reference.layers.softmax import (
    Sight,
    attend,
    project,
    unproject,
)
from kvplugin.spec import FP8_DS_MLA, KVCacheSpec, MLAAttentionSpec


class MLALayer(MixerBase):
    """Latents in the cache's dtype, or as 656-byte records (`mla_fp8`).

    Args:
        parts: what it is made of.

    Raises:
        ConfigError: the model has no latent, or not that of the records.
    """

    def __init__(self, parts: LayerParts) -> None:
        super().__init__(parts)
        packed = parts.layer.kind == "mla_fp8"
        self.memory = Memory.RECORDS if packed else Memory.LATENTS
        sizes = self._config.kv_lora_rank, self._config.rope_dim
        if not all(sizes) or (packed and sizes != (512, 64)):
            raise ConfigError(
                f"layer {self.name} of kind {parts.layer.kind}: kv_lora_rank and "
                f"rope_dim are {sizes}; MLA needs both, mla_fp8 512 and 64"
            )

    @staticmethod
    def weight_shapes(
        config: ModelConfig, layer: LayerConfig
    ) -> dict[str, WeightShape]:
        """Its weights; the latent's are not split, every rank keeps all latents."""
        hidden, heads, latent = (
            config.hidden_size,
            config.num_heads,
            config.kv_lora_rank,
        )
        size, rope = config.head_size, config.rope_dim
        value = layer.head_size_v or size
        return {
            "q": WeightShape((heads, size + rope, hidden), "heads", hidden),
            "down": WeightShape((latent, hidden), None, hidden),
            "latent_norm": WeightShape((latent,)),
            "k_rope": WeightShape((rope, hidden), None, hidden),
            "up_k": WeightShape((heads, size, latent), "heads", latent),
            "up_v": WeightShape((heads, value, latent), "heads", latent),
            "o": WeightShape(
                (heads, value, hidden), "heads", heads * value, is_output=True
            ),
        }

    def kv_cache_spec(self) -> KVCacheSpec:
        """One latent and its rotary part a token."""
        config, packed = self._config, self.memory is Memory.RECORDS
        return MLAAttentionSpec(
            block_size=self._parts.cache.block_size,
            num_kv_heads=1,
            head_size=config.kv_lora_rank + config.rope_dim,
            dtype="uint8" if packed else self._parts.cache_dtype,
            cache_dtype_str=FP8_DS_MLA if packed else None,
        )

    def mix(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        spans: Spans,
        history: TokenHistory,
    ) -> torch.Tensor:
        """See `Mixer.mix`."""
        config, weights = self._config, self._weights
        down = x @ weights["down"].T
        latent = rms_norm(down, weights["latent_norm"], config.rms_eps)
        k_rope = (x @ weights["k_rope"].T)[:, None]
        history.append(latent, rotate(k_rope, positions, config.rope_theta)[:, 0])
        query = self._queries(x, positions)
        outputs = [
            self._attend(query[span.rows], positions[span.rows], index, history)
            for index, span in enumerate(spans)
        ]
        values = torch.einsum("thl,hdl->thd", torch.cat(outputs), weights["up_v"])
        return unproject(values, weights["o"])

    def _queries(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, latent + rope]: what to multiply cached rows with."""
        query = project(x, self._weights["q"])
        plain, turned = query.split(
            [self._config.head_size, self._config.rope_dim], dim=-1
        )
        inside = torch.einsum("thd,hdl->thl", plain, self._weights["up_k"])
        turned = rotate(turned, positions, self._config.rope_theta)
        return torch.cat([inside, turned], dim=-1)

    def _attend(
        self,
        query: torch.Tensor,
        positions: torch.Tensor,
        index: int,
        history: TokenHistory,
    ) -> torch.Tensor:
        latent, rope = history.read(index, 0)
        heads = query.shape[1]
        key = torch.cat([latent, rope], dim=-1)[:, None].expand(-1, heads, -1)
        value = latent[:, None].expand(-1, heads, -1)
        keys = torch.arange(len(latent), device=positions.device)
        scale = (self._config.head_size + self._config.rope_dim) ** -0.5
        return attend(query, key, value, Sight().mask(positions, keys), scale)
