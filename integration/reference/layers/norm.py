"""RMSNorm."""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Rows scaled to a mean square of one, computed in at least fp32."""
    exact = x if x.dtype == torch.float64 else x.float()
    scaled = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)
    return weight * scaled.to(x.dtype)
