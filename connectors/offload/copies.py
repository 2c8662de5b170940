"""Who copies between a rank's KV tensors and host memory: the memory decides."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from kvplugin.connectors.offload.device_copies import DeviceCopies, cuda_device
from kvplugin.connectors.offload.host_copies import HostCopies
from kvplugin.connectors.offload.messages import HostPool
from kvplugin.contract import GroupInfo, KVTensor, Transport
from kvplugin.errors import ConfigError, LayoutMismatchError


class Copies(Protocol):
    """One rank's copies, and the host memory that they fill."""

    @property
    def may_hold_a_step(self) -> bool:
        """Whether a step may wait some time for them to end."""

    def allocate(self, pools: Sequence[HostPool]) -> int:
        """Make room for all pools, in place of what there was; the bytes.

        Raises:
            CapacityError: the machine has not so much memory.
            IntegrityError: the pools are not of these groups.
        """

    def transport(self) -> Transport:
        """A new transport over the pools; the one before must be closed."""

    def close(self) -> None:
        """Give host memory back, but for what copies under way use."""


def open_copies(groups: Sequence[GroupInfo], tensors: Mapping[str, KVTensor]) -> Copies:
    """Copies of the tensors of all groups that can be found again.

    Raises:
        LayoutMismatchError: a tensor is not laid out as its page promises, or a
            rank's tensors are on several devices.
        ConfigError: nothing moves KV in memory of this device.
    """
    layers = [layer for group in groups if group.reusable for layer in group.layers]
    devices = sorted({tensors[layer].device for layer in layers}) or ["cpu"]
    if len(devices) > 1:
        raise LayoutMismatchError(
            f"the KV tensors of one rank are on {', '.join(devices)}: offload needs "
            "them on one device"
        )
    kind = devices[0].partition(":")[0]
    if kind == "cpu":
        return HostCopies(groups, tensors)
    if kind == "cuda":
        return DeviceCopies(groups, tensors, cuda_device(devices[0]))
    raise ConfigError(
        f"the KV cache is in memory of {devices[0]!r}: offload moves KV of cpu and "
        "cuda (ROCm included)"
    )
