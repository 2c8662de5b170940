"""A `MemcpyApi` that really copies, in host memory, and says what it was asked."""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvplugin.kernels.region import Ids

Descriptor = tuple[int, int, int]
"""Target, source, bytes."""


@dataclass
class Memmove:
    """Refuses the descriptor of number `refused`, from 0 on, after those before it."""

    refused: int | None = None
    calls: list[list[Descriptor]] = field(default_factory=list)
    streams: list[int] = field(default_factory=list)

    def copy_batch(self, targets: Ids, sources: Ids, sizes: Ids, stream: int) -> str:
        for array in (targets, sources, sizes):
            assert array.dtype == "int64"
            assert array.flags.c_contiguous
        rows = list(_rows(targets, sources, sizes))
        self.calls.append(rows)
        self.streams.append(stream)
        for number, row in enumerate(rows):
            if number == self.refused:
                return "invalid argument"
            ctypes.memmove(*row)
        return ""


def _rows(targets: Ids, sources: Ids, sizes: Ids) -> Iterator[Descriptor]:
    return zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True)
