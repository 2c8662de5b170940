"""What the kernels that move bytes share: units of access, tiles, grids, ids.

Bytes move in *units*. One is 16 bytes, the widest access that a thread has, where
every address, stride and size is a multiple of 16; else it is the largest power of
two that divides them all, down to single bytes. Tables hold numbers of units, so that
the compiler sees the alignment in the multiplication.

Work is cut into *pieces* of at most a tile, which a program moves at once, without
a loop. Programs go through the pieces in turn, so that a grid has no more of them
than run at once, whatever the size of a job.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, TypeAlias

import numpy as np
import torch
import triton
import triton.language as tl

from kvplugin.kernels.ids import AnyIds, check_range, checked_pairs, flat_integers
from kvplugin.kernels.region import Ids

Decorator: TypeAlias = Callable[[Callable[..., Any]], Any]
"""What `triton.jit(...)` returns, to a type checker that does not know Triton."""
DeviceIds: TypeAlias = AnyIds | torch.Tensor
"""Block ids: a flat int64 tensor on the device, or integers in host memory."""

MAX_ACCESS_BYTES: Final = 16
TILE_UNITS: Final = 512
"""Units of a piece where they have 16 bytes: 8 KiB, four accesses a thread and side."""
NARROW_TILE_UNITS: Final = 1024
"""Narrower units: eight accesses a thread."""
# Not measured yet; 16 programs of 4 warps fill each of the 132 multiprocessors of an
# H100 or H200.
PROGRAMS: Final = 2048
"""Programs of a grid, at most."""


def access_bytes(*numbers: int) -> int:
    """The widest access that addresses, strides and sizes in bytes allow.

    Returns:
        The largest power of two, up to 16, that divides all numbers. Zeros do not
        count: without any other number it is 16.
    """
    return math.gcd(MAX_ACCESS_BYTES, *numbers)


def tile(unit: int) -> dict[str, Any]:
    """The compile-time arguments of a kernel that moves units of `unit` bytes.

    Returns:
        ``unit``; ``element``, the integer type that is loaded; ``per``, elements of
        a unit; ``units``, of a piece.
    """
    elements = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64, 16: tl.int64}
    return {
        "unit": unit,
        "element": elements[unit],
        "per": 2 if unit == MAX_ACCESS_BYTES else 1,
        "units": TILE_UNITS if unit == MAX_ACCESS_BYTES else NARROW_TILE_UNITS,
    }


def pieces(nbytes: int, unit: int) -> Iterator[tuple[int, int]]:
    """(offset, bytes) of the pieces of a run; `unit` divides all of them."""
    step = int(tile(unit)["units"]) * unit
    for offset in range(0, nbytes, step):
        yield offset, min(step, nbytes - offset)


@triton.jit  # type: ignore[untyped-decorator]
def pointer(address: tl.tensor, unit: tl.constexpr, element: tl.constexpr) -> tl.tensor:
    """A pointer from an address in units, known to be aligned to one.

    The hint must stand on the pointer: alignment is not followed through the cast.
    """
    return tl.multiple_of((address * unit).to(tl.pointer_type(element)), unit)


def programs(items: int) -> tuple[int]:
    """The grid for so many pieces; one program for none."""
    return (max(1, min(items, PROGRAMS)),)


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Launches go to `device`; on a CPU, to Triton's interpreter."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def table_on(
    device: torch.device, rows: Iterable[tuple[int, ...]], unit: int = 1
) -> torch.Tensor:
    """A kernel's table, int64 [rows, columns], of numbers that `unit` divides.

    Waited for, unlike a launch, so that any stream may use it.
    """
    return (torch.tensor(list(rows), dtype=torch.int64) // unit).to(device)


def pairs_on(
    device: torch.device,
    source_ids: DeviceIds,
    target_ids: DeviceIds,
    source_count: int,
    target_count: int,
    unit: str = "blocks",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids of a copy as int64 [n] on `device`: sources, targets.

    Tensors that are there already are taken as they are: looking into them would wait
    for the device. What is in host memory is checked, as `ids.checked_pairs` says.

    Raises:
        ValueError: what `checked_pairs` finds; one side is on the device and the
            other is not; or tensors there are not flat, int64 and of one length.
    """
    here = [_is_on(device, ids) for ids in (source_ids, target_ids)]
    if not any(here):
        pairs = checked_pairs(source_ids, target_ids, source_count, target_count, unit)
        sources, targets = _sent(device, np.stack(pairs))
    elif all(here):
        sources = _flat(source_ids, "source ids")
        targets = _flat(target_ids, "target ids")
    else:
        raise ValueError(
            f"source ids and target ids must both be tensors on {device}, or both be "
            "in host memory"
        )
    if len(sources) != len(targets):
        raise ValueError(
            f"{len(sources)} source ids do not pair with {len(targets)} target ids"
        )
    return sources, targets


def ids_on(device: torch.device, ids: DeviceIds, count: int) -> torch.Tensor:
    """Ids as int64 [n] on `device`, checked only if they come from host memory.

    Raises:
        ValueError: not a flat list of integers from 0 to count-1, or a tensor on the
            device that is not flat and int64.
    """
    if _is_on(device, ids):
        return _flat(ids, "block ids")
    array = flat_integers(ids, "block ids")
    if len(array):
        check_range(array, count, "block id")
    return _sent(device, array)


def _sent(device: torch.device, ids: Ids) -> torch.Tensor:
    """On its way to the device, in order with the current stream."""
    host = torch.from_numpy(ids)
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


def _is_on(device: torch.device, ids: DeviceIds) -> bool:
    return isinstance(ids, torch.Tensor) and ids.device == device


def _flat(ids: Any, what: str) -> torch.Tensor:
    if ids.ndim != 1 or ids.dtype != torch.int64:
        raise ValueError(
            f"{what} on a device must be a flat int64 tensor, not {ids.dtype} of shape "
            f"{tuple(ids.shape)}"
        )
    return ids.contiguous()
