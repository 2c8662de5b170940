"""Gated linear attention: a state in place of keys and values.

Each head keeps a matrix that a token changes, ``S = gate * S + key value^T``, and
reads, ``query S`` (Yang et al., 2023, with one gate a head). Before that a short
convolution mixes a token with the few before it. What is kept of a request are two
tensors, whatever its length: the convolution's last inputs and the matrices.
"""

from typing import Final

import torch
from torch.nn import functional

from kvplugin.integration.reference.config import LayerConfig, ModelConfig
from kvplugin.integration.reference.history import Span, Spans, StateHistory
from kvplugin.integration.reference.layers.base import (
    LayerParts,
    Memory,
    MixerBase,
    WeightShape,
)
from kvplugin.integration.reference.layers.softmax import unproject
from kvplugin.layout import Section, StatePart, state_parts
from kvplugin.spec import KVCacheSpec, MambaSpec, dtype_bytes

KIND: Final = "gated_linear"
"""Names its states."""


def shared_state(spec: MambaSpec, num_heads: int) -> tuple[StatePart, ...]:
    """How ranks share a layer's states: head by head.

    Args:
        spec: of a rank.
        num_heads: over all ranks.
    """
    heads = Section("heads", spec.shapes[1][0], num_heads)
    itemsizes = [dtype_bytes(dtype) for dtype in spec.dtypes]
    inputs = state_parts(spec.shapes[0], 1, [heads], itemsize=itemsizes[0], offset=0)
    matrices = state_parts(
        spec.shapes[1], 0, [heads], itemsize=itemsizes[1], offset=inputs[-1].end
    )
    return (*inputs, *matrices)


class RecurrentLayer(MixerBase):
    """One state a request.

    Args:
        parts: what it is made of.
    """

    memory = Memory.STATES

    def __init__(self, parts: LayerParts) -> None:
        super().__init__(parts)
        config, heads = self._config, parts.shard.size("heads")
        size = config.head_size
        self._value_size = value = parts.layer.head_size_v or size
        self._shapes = (
            (config.conv_kernel - 1, heads, 2 * size + value),
            (heads, size, value),
        )

    @staticmethod
    def weight_shapes(
        config: ModelConfig, layer: LayerConfig
    ) -> dict[str, WeightShape]:
        """Its weights, heads first; a head's channels are query, key and value."""
        hidden, heads = config.hidden_size, config.num_heads
        value = layer.head_size_v or config.head_size
        channels = 2 * config.head_size + value
        return {
            "in": WeightShape((heads, channels, hidden), "heads", hidden),
            "conv": WeightShape(
                (heads, channels, config.conv_kernel), "heads", config.conv_kernel
            ),
            "gate": WeightShape((heads, hidden), "heads", hidden),
            "o": WeightShape(
                (heads, value, hidden), "heads", heads * value, is_output=True
            ),
        }

    def kv_cache_spec(self) -> KVCacheSpec:
        """Both tensors of a state, in the model's dtype."""
        cache, dtype = self._parts.cache, self._config.dtype
        return MambaSpec(
            block_size=cache.mamba_block_size,
            shapes=self._shapes,
            dtypes=(dtype, dtype),
            mamba_type=KIND,
            mamba_cache_mode=cache.mamba_cache_mode,
            num_speculative_blocks=cache.num_drafts,
        )

    def mix(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        spans: Spans,
        history: StateHistory,
    ) -> torch.Tensor:
        """See `Mixer.mix`."""
        del positions
        inputs = torch.einsum("tm,hcm->thc", x, self._weights["in"])
        gates = torch.sigmoid(x @ self._weights["gate"].T)
        outputs = [
            self._scan(inputs[span.rows], gates[span.rows], index, span, history)
            for index, span in enumerate(spans)
        ]
        return unproject(torch.cat(outputs), self._weights["o"])

    def _scan(
        self,
        inputs: torch.Tensor,
        gates: torch.Tensor,
        index: int,
        span: Span,
        history: StateHistory,
    ) -> torch.Tensor:
        """One request, token by token: [tokens, heads, value]."""
        state = history.load(index)
        if state is None:
            state = tuple(inputs.new_zeros(shape) for shape in self._shapes)
        recent, memory = state
        size, outputs = self._config.head_size, []
        for row, (new, gate) in enumerate(zip(inputs, gates, strict=True), 1):
            window = torch.cat([recent, new[None]])
            mixed = functional.silu(
                torch.einsum("khc,hck->hc", window, self._weights["conv"])
            )
            query, key, value = mixed.split([size, size, self._value_size], dim=-1)
            memory = gate[:, None, None] * memory + key[:, :, None] * value[:, None]
            recent = window[1:]
            outputs.append(torch.einsum("hk,hkv->hv", query, memory))
            history.keep(index, span.num_computed + row, (recent, memory))
        return torch.stack(outputs)
