"""Tensors inside buffers that are full of bytes of their own: the canaries."""

import math
from dataclasses import dataclass

import torch

MARGIN = 256
"""Bytes before and after what a test uses."""


@dataclass
class Guarded:
    """Memory that a kernel may use, with canaries around it.

    `buffer` holds `MARGIN` canaries, `shift` more, the usable bytes, and `MARGIN`
    again: with an odd `shift` the usable bytes are as badly aligned as can be.
    """

    buffer: torch.Tensor
    before: torch.Tensor
    after: torch.Tensor
    data: torch.Tensor
    """The usable bytes, uint8 [nbytes]."""

    @classmethod
    def of(cls, nbytes: int, *, shift: int = 0, seed: int = 0) -> "Guarded":
        generator = torch.Generator().manual_seed(seed)
        size = 2 * MARGIN + shift + nbytes
        buffer = torch.randint(
            0, 256, (size + 15,), dtype=torch.uint8, generator=generator
        )
        buffer = buffer[-buffer.data_ptr() % 16 :][:size]
        start = MARGIN + shift
        before, after = buffer[:start].clone(), buffer[start + nbytes :].clone()
        return cls(buffer, before, after, buffer[start : start + nbytes])

    def view(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """The usable bytes, which `shape` fills, as a tensor (aligned for `dtype`)."""
        assert math.prod(shape) * dtype.itemsize == len(self.data)
        return self.data.view(dtype).view(shape)

    def check(self) -> None:
        """Nothing around the usable bytes has changed."""
        start = len(self.before)
        assert torch.equal(self.buffer[:start], self.before)
        assert torch.equal(self.buffer[start + len(self.data) :], self.after)
