"""Slot mappings on a device: every token of every group in one launch.

The twin of `host_slots.py`, which tells what a slot is.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from kvplugin.kernels.host_slots import PAD_SLOT, SlotTables, check_arguments
from kvplugin.kernels.words import Decorator, on

TOKENS_PER_PROGRAM: Final = 1024
"""A decode step is one program a group, a prefill of 8,192 tokens eight. Not measured
yet; launching costs more than any choice can save."""

# The number of tokens changes from step to step: no variant is compiled for it.
_slots_kernel: Decorator = triton.jit(do_not_specialize=["count"])


def slot_mappings(
    tables: SlotTables, rows: torch.Tensor, positions: torch.Tensor, out: torch.Tensor
) -> None:
    """Write the slots of all tokens in all groups; as `host_slots.slot_mappings`.

    Launched on the current stream and not waited for. Nothing is read back, so a CUDA
    graph may hold the launch: tokens that a replay does not have are rows of `NO_ROW`.

    Raises:
        ValueError: a shape, dtype, stride or device is not as required.
    """
    check_arguments(tables, rows, positions, out)
    if not out.numel():
        return
    groups, width = out.shape
    grid = (triton.cdiv(width, TOKENS_PER_PROGRAM), groups)
    with on(out.device):
        write_slots[grid](
            tables.descriptors,
            rows,
            positions,
            out,
            out.stride(0),
            len(rows),
            width,
            tables.interleave,
            pad=PAD_SLOT,
            tokens=TOKENS_PER_PROGRAM,
        )


@_slots_kernel
def write_slots(
    descriptors: tl.tensor,
    rows: tl.tensor,
    positions: tl.tensor,
    out: tl.tensor,
    out_stride: tl.tensor,
    count: tl.tensor,
    width: tl.tensor,
    interleave: tl.tensor,
    pad: tl.constexpr,
    tokens: tl.constexpr,
) -> None:
    """Program (i, g) writes tokens ``i * tokens`` and following of group g.

    A description is six numbers, see `SlotTables.descriptors`.
    """
    group = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * tokens + tl.arange(0, tokens)
    row = tl.load(rows + at, mask=at < count, other=-1)
    position = tl.load(positions + at, mask=at < count, other=0)
    described = descriptors + group * 6
    table = tl.load(described).to(tl.pointer_type(tl.int32))
    row_stride = tl.load(described + 1)
    block_size = tl.load(described + 2).to(tl.int32)
    ranks = tl.load(described + 3).to(tl.int32)
    rank = tl.load(described + 4).to(tl.int32)
    kept = (row >= 0) & (position >= 0) & (position < tl.load(described + 5))
    # Divisions of 32 bits are several times cheaper, and what is kept fits.
    token = tl.where(kept, position, 0).to(tl.int32)
    kept &= token // interleave % ranks == rank
    local = token // (interleave * ranks) * interleave + token % interleave
    entry = table + row.to(tl.int64) * row_stride + local // block_size
    block = tl.load(entry, mask=kept, other=0).to(tl.int64)
    slot = tl.where(kept, block * block_size + local % block_size, pad)
    tl.store(out + group * out_stride + at, slot, mask=at < width)
