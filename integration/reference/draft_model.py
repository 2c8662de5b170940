"""What a drafter computes: one layer over pairs of a token and a hidden state.

The row at position i is made of the token at i + 1 and of the target's hidden state at
i, and what comes of it tells the token at i + 2 (EAGLE, Li et al., 2024; multi-token
prediction of DeepSeek-V3). Behind the last token the drafter goes on alone: its own
tokens, and its own hidden states.

So the KV of the last token of a block depends on a token that is not in the block, and
not in its hash: after a hit the last block must be one behind which the same token
stood.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from msgspec import structs

from kvplugin.errors import ConfigError
from kvplugin.integration.reference.config import LayerConfig, ModelConfig
from kvplugin.integration.reference.dense import dense_hidden
from kvplugin.integration.reference.history import Span
from kvplugin.integration.reference.layers import KINDS
from kvplugin.integration.reference.model import Model
from kvplugin.integration.reference.weights import random_model

_SHARED: Final = ("embed", "norm", "head")


@dataclass(frozen=True, eq=False)
class DraftModel:
    """A layer of its own; embeddings, the last norm and the head are the target's."""

    model: Model
    """Of this one layer."""
    project: torch.Tensor
    """[hidden, 2 * hidden], from embedding and hidden state to the layer's input."""

    def inputs(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Rows [tokens, hidden] for the layer.

        Args:
            embedded: of the tokens one position on, [tokens, hidden].
            hidden: states at the positions themselves, [tokens, hidden].
        """
        return torch.cat([embedded, hidden], dim=-1) @ self.project.T


def random_draft_model(
    target: Model,
    layer: LayerConfig = LayerConfig(),  # noqa: B008
    *,
    seed: int = 0,
    hidden_scale: float = 0.25,
) -> DraftModel:
    """A drafter that is sometimes right: its layer is a copy of the target's first one
    of the same weights, if there is one, and the layers behind it matter less the
    smaller the target's `depth_scale`.

    Args:
        target: whose tokens it will propose.
        layer: of kind full or sliding_window.
        seed: of the other weights.
        hidden_scale: how much the hidden states count beside embeddings.

    Raises:
        ConfigError: the layer is of another kind, or shares its cache.
    """
    if layer.kind not in ("full", "sliding_window") or layer.shares is not None:
        raise ConfigError(
            f"a drafter's layer of kind {layer.kind} (shares={layer.shares}): it must "
            "be full or sliding_window, with a cache of its own"
        )
    config = structs.replace(target.config, layers=(layer,))
    device = target.weights["embed"].device
    weights = dict(random_model(config, seed, device=device).weights)
    weights |= {n: target.weights[n] for n in _SHARED if n in weights}
    weights |= _copied(target, config)
    size = config.hidden_size
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(size, size, generator=generator, dtype=torch.float64)
    mixing *= hidden_scale / size**0.5
    project = torch.cat([torch.eye(size, dtype=torch.float64), mixing], dim=1)
    return DraftModel(Model(config, weights), project.to(config.torch_dtype).to(device))


def _copied(target: Model, config: ModelConfig) -> dict[str, torch.Tensor]:
    """The weights of a like layer; of the first one those outside its mixer."""

    def shapes(layer: LayerConfig) -> object:
        return KINDS[layer.kind].weight_shapes(target.config, layer)

    wanted, layers = shapes(config.layers[0]), target.config.layers
    alike = [n for n, layer in enumerate(layers) if shapes(layer) == wanted]
    prefix = f"layers.{alike[0] if alike else 0}."
    own = {
        name.removeprefix(prefix): weight
        for name, weight in target.weights.items()
        if name.startswith(prefix)
    }
    return {
        f"layers.0.{name}": weight
        for name, weight in own.items()
        if alike or not name.startswith("mixer.")
    }


def target_hidden(target: Model, token_ids: Sequence[int]) -> torch.Tensor:
    """The hidden states [tokens, hidden] that a drafter reads, without any cache."""
    rank = target.rank()
    x = rank.embed(token_ids)
    return dense_hidden(rank, x, _whole(x))


def dense_drafts(
    draft: DraftModel, hidden: torch.Tensor, token_ids: Sequence[int], count: int
) -> tuple[list[int], torch.Tensor]:
    """The drafts after these tokens, computed without any cache.

    Args:
        draft: the drafter.
        hidden: of the target, for all tokens but the last: [tokens - 1, hidden].
        token_ids: all tokens that are known, two at least.
        count: tokens to propose.

    Returns:
        The tokens, and the logits [count, vocabulary] that they came from.
    """
    own = draft.model.rank()
    inputs = draft.inputs(own.embed(token_ids[1:]), hidden)
    tokens: list[int] = []
    rows = []
    for _ in range(count):
        hidden = dense_hidden(own, inputs, _whole(inputs))[-1:]
        rows.append(own.logits(hidden))
        tokens.append(int(rows[-1].argmax()))
        new = draft.inputs(own.embed(tokens[-1:]), hidden)
        inputs = torch.cat([inputs, new])
    return tokens, torch.cat(rows)


def _whole(x: torch.Tensor) -> Span:
    """One request that is computed at once."""
    return Span(0, len(x), 0, len(x))
