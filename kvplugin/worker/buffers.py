"""Arrays that the host fills and a device reads."""

from typing import Final

import numpy.typing as npt
import torch

from kvplugin.worker.pushes import PushApi, Ring, TorchPushes

PIPELINE_DEPTH: Final = 2
"""Steps in flight with asynchronous scheduling."""


class MirroredTensor:
    """A zeroed tensor on the host, and its copy on the device.

    On a CPU the copy is a copy too: what a step reads does not change when the next
    one is prepared. To a GPU entries go by way of pinned buffers, one a step in flight
    and one more, so that the host may prepare steps while earlier ones are not even
    copied yet.

    Args:
        shape: of both.
        dtype: of both.
        device: where the copy lies.
        pipeline_depth: steps that may be in flight at once; each pushes once.
        pushes: how copies are put on the device's stream; None for torch's own way,
            which on a CPU is a plain copy.
    """

    def __init__(
        self,
        *shape: int,
        dtype: torch.dtype,
        device: torch.device | str,
        pipeline_depth: int = PIPELINE_DEPTH,
        pushes: PushApi | None = None,
    ) -> None:
        self.device = torch.zeros(shape, dtype=dtype, device=device)
        self.host = torch.zeros(shape, dtype=dtype)
        self.array: npt.NDArray = self.host.numpy()
        """The host's side; fill it here, whenever."""
        if pushes is None and self.device.device.type != "cpu":
            pushes = TorchPushes(self.device.device)
        self._ring: Ring | None = None
        if pushes is not None:
            self._ring = Ring(pushes, self.host, pipeline_depth + 1)

    def push(self, count: int) -> torch.Tensor:
        """Copy the leading `count` entries; a view of them on the device.

        On a GPU the copy is put on the current stream, as must be all that reads the
        view: it is the same memory at every call.
        """
        view, rows = self.device[:count], self.host[:count]
        if self._ring is None:
            view.copy_(rows)
        else:
            self._ring.push(view, rows)
        return view
