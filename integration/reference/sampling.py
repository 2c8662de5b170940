"""From logits to tokens."""

from dataclasses import dataclass

import torch

_PRIME = 1_000_003


@dataclass(frozen=True, slots=True)
class Sampler:
    """How the tokens of one request are chosen.

    A token is a pure function of its logits, its position and the seed: what is
    computed twice, after a preemption or a rejected draft, comes out the same.
    """

    temperature: float = 0.0
    """0 takes the likeliest token."""
    seed: int = 0

    def token(self, logits: torch.Tensor, position: int) -> int:
        """The token at `position` of the request.

        Args:
            logits: [vocabulary], of the token before it.
            position: of the token that is chosen.
        """
        if not self.temperature:
            return int(logits.argmax())
        generator = torch.Generator().manual_seed(self.seed * _PRIME + position)
        noise = torch.rand(len(logits), generator=generator, dtype=torch.float64)
        # The largest of logits plus Gumbel noise is a sample of their softmax.
        gumbel = -torch.log(-torch.log(noise.clamp(1e-12, 1 - 1e-12)))
        return int((logits.cpu().double() / self.temperature + gumbel).argmax())
