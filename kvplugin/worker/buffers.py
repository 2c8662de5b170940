"""Arrays that the host fills and a device reads."""

import numpy.typing as npt
import torch


class MirroredTensor:
    """A zeroed tensor on the host, pinned beside a GPU, and its copy on the device.

    On a CPU the copy is a copy too: what a step reads does not change when the next
    one is prepared.

    Args:
        shape: of both.
        dtype: of both.
        device: where the copy lies.
    """

    def __init__(
        self, *shape: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.device = torch.zeros(shape, dtype=dtype, device=device)
        pinned = self.device.device.type == "cuda"
        self.host = torch.zeros(shape, dtype=dtype, pin_memory=pinned)
        self.array: npt.NDArray = self.host.numpy()
        """The host's side; fill it here."""

    def push(self, count: int) -> torch.Tensor:
        """Copy the leading `count` entries; a view of them on the device.

        On a GPU the copy is put on the current stream: let it pass before the host's
        side is written again. The view is the same memory at every call.
        """
        view = self.device[:count]
        view.copy_(self.host[:count], non_blocking=True)
        return view
