"""Rotary positions as Llama has them: the halves of a head are rotated."""

import torch


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Turn each pair (i, i + dim / 2) by ``position * theta ** (-2 i / dim)``.

    Args:
        x: [tokens, heads, dim] with an even `dim`.
        positions: int64 [tokens].
        theta: base of the angles.
    """
    half = x.shape[-1] // 2
    exact = torch.float64 if x.dtype == torch.float64 else torch.float32
    steps = torch.arange(half, dtype=exact, device=x.device) * 2 / x.shape[-1]
    angles = positions.to(exact)[:, None, None] / theta**steps
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    one, other = x[..., :half], x[..., half:]
    return torch.cat([one * cos - other * sin, other * cos + one * sin], dim=-1)
