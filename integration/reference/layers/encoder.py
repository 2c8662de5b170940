"""Encoder-only attention: the prompt is seen both ways, and nothing is kept.

Tokens that are generated see themselves only. Since nothing is kept, a prompt has to
be computed in one step, without a hit: the engine refuses settings that allow others.
"""

import torch

from kvplugin.errors import IntegrityError
from kvplugin.integration.reference.config import LayerConfig, ModelConfig
from kvplugin.integration.reference.history import Span, Spans, TokenHistory
from kvplugin.integration.reference.layers.base import (
    LayerParts,
    MixerBase,
    WeightShape,
)
from kvplugin.integration.reference.layers.softmax import (
    SoftmaxLayer,
    attend,
    project,
    unproject,
)


class EncoderLayer(MixerBase):
    """Grouped heads over the prompt.

    Args:
        parts: what it is made of.
    """

    def __init__(self, parts: LayerParts) -> None:
        super().__init__(parts)
        self._kv_head = parts.shard.kv_head_of_each_query_head()

    @staticmethod
    def weight_shapes(
        config: ModelConfig, layer: LayerConfig
    ) -> dict[str, WeightShape]:
        """As of causal attention."""
        return SoftmaxLayer.weight_shapes(config, layer)

    def kv_cache_spec(self) -> None:
        """It has no cache."""

    def mix(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        spans: Spans,
        history: TokenHistory | None = None,
    ) -> torch.Tensor:
        """See `Mixer.mix`; without positions in the rotation, and without a history."""
        del positions, history
        query, key, value = (project(x, self._weights[n]) for n in ("q", "k", "v"))
        key, value = key[:, self._kv_head], value[:, self._kv_head]
        outputs = [
            attend(
                query[span.rows],
                key[span.rows],
                value[span.rows],
                self._seen(span, x.device),
                self._config.head_size**-0.5,
            )
            for span in spans
        ]
        return unproject(torch.cat(outputs), self._weights["o"])

    def _seen(self, span: Span, device: torch.device) -> torch.Tensor:
        """bool [tokens, tokens]: prompt sees prompt, others themselves."""
        count, prompt = span.stop - span.start, span.num_prompt - span.num_computed
        if (span.num_computed and prompt > 0) or (prompt > 0 and prompt > count):
            raise IntegrityError(
                f"layer {self.name} sees the prompt both ways, but a step computes "
                f"tokens {span.num_computed} to {span.end} of {span.num_prompt}"
            )
        seen = torch.eye(count, dtype=torch.bool, device=device)
        seen[: max(prompt, 0), : max(prompt, 0)] = True
        return seen
