"""Memory to copy between, and ids of the blocks that move."""

import mmap
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from benchmarks._timing import Work

Memory: TypeAlias = npt.NDArray[np.uint8]
Ids: TypeAlias = npt.NDArray[np.int64]


def memory_of(nbytes: int, huge_pages: bool) -> Memory:
    """Memory that has been written to: no timing shall pay for page faults."""
    pages = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)
    memory = np.frombuffer(pages, np.uint8)
    memory[:] = 1
    return memory


def half_of(blocks: int, run: int, seed: int) -> Ids:
    """Half the ids 0 to blocks-1, in runs of `run` at random places; 0: in order."""
    if not run:
        return np.arange(blocks // 2)
    generator = np.random.default_rng(seed)
    starts = generator.permutation(blocks // run)[: blocks // run // 2] * run
    return (starts[:, None] + np.arange(run)).ravel()


def contiguous(source: Memory, target: Memory, threads: int) -> Work:
    """The baseline: half of the memory in one copy a thread."""
    half = len(source) // 2
    step = half // threads

    def copy(start: int) -> int:
        np.copyto(target[start : start + step], source[start : start + step])
        return step

    return together([lambda start=i * step: copy(start) for i in range(threads)])


def together(works: list[Work]) -> Work:
    """All of them at once, a thread each."""
    if len(works) == 1:
        return works[0]
    pool = ThreadPoolExecutor(len(works))
    return lambda: sum(pool.map(lambda work: work(), works))
