"""One public function for each operation on KV memory; the device says who does it.

Memory of a CPU is moved by the host engines (`host*.py`), that of a GPU (CUDA or ROCm:
torch calls both ``cuda``) by Triton kernels. Both have the same interface and the same
semantics; what a device cannot check (ids and slots in its own memory) its docstrings
say. Between a GPU and the host its copy engines serve too (`transfer_copier`). Nothing
is imported before it is needed: Triton only where there is a GPU.
"""

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from kvplugin.errors import ConfigError
from kvplugin.kernels.region import Region
from kvplugin.layout import Conversion

if TYPE_CHECKING:
    import torch

    from kvplugin.kernels.host_slots import SlotTables
    from kvplugin.kernels.streams import Direction


class Copier(Protocol):
    """Moves blocks between two lists of regions."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all regions."""

    def copy(self, source_ids: Any, target_ids: Any) -> int:
        """Copy block source_ids[i] to target_ids[i]; the bytes copied. On a device the
        copy is launched on the current stream and not waited for."""


class Converter(Protocol):
    """Executes a `Conversion` between two memories."""

    @property
    def chunk_bytes(self) -> int:
        """Bytes that move with one chunk."""

    def convert(self, source_chunks: Any, target_chunks: Any) -> int:
        """Carry chunk source_chunks[i] to target_chunks[i]; the bytes moved. On a
        device it is launched on the current stream and not waited for."""


class Zeroer(Protocol):
    """Zeroes blocks of a list of regions."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all regions."""

    def zero(self, ids: Any) -> int:
        """Zero these blocks; the bytes zeroed. On a device it is launched on the
        current stream and not waited for."""


def block_copier(
    sources: Sequence[Region],
    targets: Sequence[Region],
    device: "torch.device | str" = "cpu",
) -> Copier:
    """Copies of blocks: pool to pool, gather, scatter, host to device and back.

    Args:
        sources: where blocks are read.
        targets: where they are written.
        device: who copies. A GPU also reaches pinned host memory, on either side.

    Raises:
        ValueError: the sides do not pair up.
        ConfigError: no engine for this device.
    """
    copier: Copier
    if _is_cpu(device):
        copier = _module("host").BlockCopier(sources, targets)
    else:
        copier = _module("copy").DeviceBlockCopier(sources, targets, _torch(device))
    return copier


def transfer_copier(
    device_regions: Sequence[Region],
    host_regions: Sequence[Region],
    direction: "Direction",
    device: "torch.device | str" = "cpu",
    *,
    pinned: bool = False,
    cuts: Sequence[int] = (),
) -> Copier:
    """Copies of blocks between a device and the host, one way.

    On a GPU by DMA or a kernel, as `choice.py` says of each job; kernels are compiled
    now, not at the first one. A CPU's "device"
    memory is host memory like the other, and `pinned` and `cuts` mean nothing to it.

    Args:
        device_regions: blocks on the device.
        host_regions: blocks in host memory.
        direction: which way.
        device: whose memory the device regions are, and who copies.
        pinned: whether the host memory is registered with the driver; without, copies
            of a GPU wait on the host (`transfer.TransferCopier`).
        cuts: addresses where pinned pieces of host memory meet.

    Raises:
        ValueError: the sides do not pair up.
        ConfigError: no engine for this device.
    """
    copier: Copier
    if _is_cpu(device):
        sides = (device_regions, host_regions)
        sides = sides[::-1] if direction == "load" else sides
        copier = _module("host").BlockCopier(*sides)
    else:
        copier = _module("transfer").warm_copier(
            device_regions, host_regions, direction, _torch(device), pinned, cuts=cuts
        )
    return copier


def block_converter(
    conversion: Conversion,
    source_address: int,
    target_address: int,
    device: "torch.device | str" = "cpu",
) -> Converter:
    """Copies of rows into another layout: NHD and HND, other block sizes, some heads.

    Args:
        conversion: the plan, from `kvplugin.layout.plan_conversion`.
        source_address: what the source layout's offsets count from.
        target_address: the same for the target.
        device: who copies.

    Raises:
        ValueError: an address is not positive, or a side has too many chunks.
        ConfigError: no engine for this device.
    """
    converter: Converter
    places = (conversion, source_address, target_address)
    if _is_cpu(device):
        converter = _module("host_convert").BlockConverter(*places)
    else:
        converter = _module("permute").DeviceBlockConverter(*places, _torch(device))
    return converter


def block_zeroer(
    regions: Sequence[Region], device: "torch.device | str" = "cpu"
) -> Zeroer:
    """Zeroing of new blocks.

    Raises:
        ValueError: there are no regions.
        ConfigError: no engine for this device.
    """
    zeroer: Zeroer
    if _is_cpu(device):
        zeroer = _module("host_zero").BlockZeroer(regions)
    else:
        zeroer = _module("zero").DeviceBlockZeroer(regions, _torch(device))
    return zeroer


def copy_batch(
    sources: "torch.Tensor", targets: "torch.Tensor", sizes: "torch.Tensor"
) -> None:
    """Copy sizes[i] bytes from address sources[i] to address targets[i].

    Args:
        sources: int64 [runs], on the device that copies.
        targets: as many.
        sizes: as many, in bytes.

    Raises:
        ValueError: these are not int64 lists of one length on one device.
        ConfigError: no engine for this device.
    """
    if _is_cpu(sources.device):
        _module("host_batch").copy_batch(
            *(t.numpy() for t in (sources, targets, sizes))
        )
    else:
        _module("copy").copy_batch(sources, targets, sizes)


def write_kv(
    key: "torch.Tensor",
    value: "torch.Tensor",
    key_cache: "torch.Tensor",
    value_cache: "torch.Tensor",
    slots: "torch.Tensor",
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Write new keys and values at their slots; see `host_cache_write.write_kv`."""
    _writer(key).write_kv(
        key, value, key_cache, value_cache, slots, k_scale=k_scale, v_scale=v_scale
    )


def write_latent(
    kv_c: "torch.Tensor",
    k_pe: "torch.Tensor",
    cache: "torch.Tensor",
    slots: "torch.Tensor",
    *,
    scale: float = 1.0,
) -> None:
    """Write new MLA latents at their slots; see `host_cache_write.write_latent`."""
    _writer(kv_c).write_latent(kv_c, k_pe, cache, slots, scale=scale)


def write_ds_mla(
    kv_c: "torch.Tensor",
    k_pe: "torch.Tensor",
    cache: "torch.Tensor",
    slots: "torch.Tensor",
) -> None:
    """Write new records of `fp8_ds_mla`; see `host_cache_write.write_ds_mla`."""
    _writer(kv_c).write_ds_mla(kv_c, k_pe, cache, slots)


def slot_mappings(
    tables: "SlotTables",
    rows: "torch.Tensor",
    positions: "torch.Tensor",
    out: "torch.Tensor",
) -> None:
    """Write the slots of all tokens in all groups; see `host_slots.slot_mappings`."""
    engine = _module("host_slots" if _is_cpu(out.device) else "slots")
    engine.slot_mappings(tables, rows, positions, out)


def _writer(tensor: "torch.Tensor") -> Any:
    return _module("host_cache_write" if _is_cpu(tensor.device) else "cache_write")


def _is_cpu(device: "torch.device | str") -> bool:
    """Whether the host engines serve this device.

    Raises:
        ConfigError: neither they nor Triton do.
    """
    kind = str(device).partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise ConfigError(
            f"no engine moves KV memory on device {str(device)!r}: there are engines "
            "for cpu and cuda (ROCm included)"
        )
    return kind == "cpu"


def _torch(device: "torch.device | str") -> "torch.device":
    """The GPU.

    Raises:
        ConfigError: torch finds none of this number.
    """
    import torch

    found, count = torch.device(device), torch.cuda.device_count()
    if (found.index or 0) >= count:
        raise ConfigError(
            f"no engine moves KV memory on device {str(device)!r}: torch finds {count} "
            "GPUs. Use a torch built for the GPU, or another device"
        )
    return found


def _module(name: str) -> Any:
    return importlib.import_module(f"kvplugin.kernels.{name}")
