"""A decoder whose layers mix tokens as each one's kind says.

One function runs it, `decode`: over one rank or several in lock-step, over plain
tensors or over KV blocks.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.nn import functional

from kvplugin.integration.reference.config import ModelConfig
from kvplugin.integration.reference.history import Spans
from kvplugin.integration.reference.layers import (
    KINDS,
    CacheSettings,
    LayerParts,
    Mixer,
    Shard,
    WeightShape,
)
from kvplugin.integration.reference.layers.norm import rms_norm

HistoryOf: TypeAlias = Callable[[int, Mixer], Any]
"""(rank, layer) -> its history of the step; None for kinds without one."""


def weight_shapes(config: ModelConfig) -> dict[str, WeightShape]:
    """All weights of a model, by name."""
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes = {
        "embed": WeightShape((config.vocab_size, hidden), None, 1),
        "norm": WeightShape((hidden,)),
    }
    if not config.tie_embeddings:
        shapes["head"] = WeightShape((config.vocab_size, hidden), None, hidden)
    for number, layer in enumerate(config.layers):
        own = {
            "mix_norm": WeightShape((hidden,)),
            "feed_norm": WeightShape((hidden,)),
            "gate": WeightShape((inner, hidden), "intermediate", hidden),
            "up": WeightShape((inner, hidden), "intermediate", hidden),
            "down": WeightShape((inner, hidden), "intermediate", inner, is_output=True),
        }
        mixer = KINDS[layer.kind].weight_shapes(config, layer)
        own |= {f"mixer.{name}": shape for name, shape in mixer.items()}
        shapes |= {f"layers.{number}.{name}": shape for name, shape in own.items()}
    return shapes


@dataclass(frozen=True, eq=False)
class Model:
    """A whole model."""

    config: ModelConfig
    weights: Mapping[str, torch.Tensor]
    """By the names and in the shapes of `weight_shapes`."""

    def rank(
        self,
        cache: CacheSettings = CacheSettings(),  # noqa: B008
        rank: int = 0,
        ranks: int = 1,
        prefix: str = "layers",
    ) -> "RankModel":
        """The part of one tensor-parallel rank.

        Args:
            cache: what the engine decides about caches.
            rank: which one.
            ranks: their number.
            prefix: of the layers' names, where an engine has several models.

        Raises:
            ConfigError: the ranks cannot share the model evenly.
        """
        shard = Shard(self.config, rank, ranks)
        shapes = weight_shapes(self.config)
        weights = {
            name: weight[shard.part(shapes[name].split)]
            for name, weight in self.weights.items()
        }
        return RankModel(shard, weights, cache, prefix)


class RankModel:
    """One rank's part: its heads, its share of the inner layers, all the rest.

    Args:
        shard: which part.
        weights: its own, by the names of `weight_shapes`.
        cache: what the engine decides about caches.
        prefix: of the layers' names.
    """

    def __init__(
        self,
        shard: Shard,
        weights: Mapping[str, torch.Tensor],
        cache: CacheSettings,
        prefix: str = "layers",
    ) -> None:
        self.shard = shard
        self.config = shard.config
        self.weights = weights
        self.mixers: list[Mixer] = [
            KINDS[layer.kind].make(
                LayerParts(
                    number,
                    layer,
                    shard,
                    cache,
                    self._under(f"layers.{number}.mixer."),
                    prefix,
                )
            )
            for number, layer in enumerate(shard.config.layers)
        ]

    def _under(self, prefix: str) -> dict[str, torch.Tensor]:
        return {
            name.removeprefix(prefix): weight
            for name, weight in self.weights.items()
            if name.startswith(prefix)
        }

    def embed(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Rows [tokens, hidden]."""
        table = self.weights["embed"]
        return table[torch.tensor(token_ids, dtype=torch.int64, device=table.device)]

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """The norm of this name."""
        return rms_norm(x, self.weights[name], self.config.rms_eps)

    def feed(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of a layer's SwiGLU."""
        gate, up, down = (
            self.weights[f"layers.{number}.{name}"] for name in ("gate", "up", "down")
        )
        return (functional.silu(x @ gate.T) * (x @ up.T)) @ down

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, vocabulary] of the decoder's hidden states."""
        head = self.weights.get("head", self.weights["embed"])
        return self.norm("norm", x) @ head.T


def decode(
    ranks: Sequence[RankModel],
    x: torch.Tensor,
    positions: torch.Tensor,
    spans: Spans,
    history_of: HistoryOf,
) -> torch.Tensor:
    """Run all layers; the ranks' parts of each output are summed.

    Args:
        ranks: all ranks of the model, or the only one.
        x: embedded tokens [tokens, hidden].
        positions: int64 [tokens], of each token in its request.
        spans: the requests.
        history_of: where a rank's layer keeps what it has seen.

    Returns:
        Hidden states [tokens, hidden] for `RankModel.logits`.
    """
    first = ranks[0]
    for number in range(len(first.mixers)):
        inside = first.norm(f"layers.{number}.mix_norm", x)
        mixers = [(rank, model.mixers[number]) for rank, model in enumerate(ranks)]
        x = x + _sum(
            mixer.mix(inside, positions, spans, history_of(rank, mixer))
            for rank, mixer in mixers
        )
        inside = first.norm(f"layers.{number}.feed_norm", x)
        x = x + _sum(model.feed(number, inside) for model in ranks)
    return x


def _sum(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    """As an all-reduce leaves it on every rank."""
    total, *others = parts
    for part in others:
        total = total + part
    return total
