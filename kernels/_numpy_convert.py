"""The numpy engine of `host_convert.py`: an indexed assignment a box and 16 MiB."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvplugin.kernels._numpy_memory import CHUNK_BYTES, array_of_runs, pieces
from kvplugin.kernels.region import Copy, Ids
from kvplugin.layout import Box, Conversion


def bind(conversion: Conversion, source_address: int, target_address: int) -> Copy:
    """A function that converts chunks from one memory to another."""
    boxes = [
        _arrays(
            conversion,
            replace(box, nbytes=nbytes),
            source_address + start,
            target_address + start,
        )
        for box in conversion.boxes
        for start, nbytes in pieces(box.nbytes)
    ]
    step = max(1, CHUNK_BYTES // max(box.total_bytes for box in conversion.boxes))

    def convert(source_ids: Ids, target_ids: Ids) -> None:
        for source, target in boxes:
            for start in range(0, len(target_ids), step):
                chunk = slice(start, start + step)
                from_, to = source_ids[chunk], target_ids[chunk]
                target[np.divmod(to, conversion.target_chunks)] = source[
                    np.divmod(from_, conversion.source_chunks)
                ]

    return convert


def _arrays(
    conversion: Conversion, box: Box, source_address: int, target_address: int
) -> tuple[npt.NDArray[np.void], npt.NDArray[np.void]]:
    """Rows of both sides, indexed [block, place of the chunk, axes of the box]."""
    extents = tuple(axis.extent for axis in box.axes)
    source = array_of_runs(
        source_address + box.source.offset,
        box.nbytes,
        (conversion.source.num_blocks, conversion.source_chunks, *extents),
        (*box.source[1:], *(axis.source_stride for axis in box.axes)),
    )
    target = array_of_runs(
        target_address + box.target.offset,
        box.nbytes,
        (conversion.target.num_blocks, conversion.target_chunks, *extents),
        (*box.target[1:], *(axis.target_stride for axis in box.axes)),
    )
    return source, target
