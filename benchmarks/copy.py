"""How near copies of KV blocks come to one contiguous copy of as many bytes."""

import json
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

import click
import numpy as np
import numpy.typing as npt

from benchmarks._timing import Speed, Work, speeds
from kvplugin.kernels.host import BlockCopier, Region

Ids = npt.NDArray[np.int64]
Engine = Literal["numba", "numpy"]
Shape = Literal["layers", "slots"]
"""layers: [regions, blocks, bytes], as KV tensors. slots: [blocks, regions, bytes],
as a host pool. With one region they are the same."""


@dataclass(frozen=True)
class Case:
    """Half the blocks of one memory go to half the blocks of another."""

    name: str
    block_kib: int
    """Of one region."""
    source_run: int
    """Ids in a row before the next jump; 0: all in order."""
    target_run: int
    regions: int = 1
    source: Shape = "layers"
    target: Shape = "layers"


CASES = (
    Case("gather 64 KiB", 64, 1, 0),
    Case("scatter 64 KiB", 64, 0, 1),
    Case("pool to pool 64 KiB", 64, 1, 1),
    Case("store 30 layers of 96 KiB", 96, 1, 1, 30, "layers", "slots"),
    Case("load 30 layers of 96 KiB", 96, 1, 1, 30, "slots", "layers"),
    Case("pool to pool 16 KiB", 16, 1, 1),
    Case("pool to pool 16 KiB, runs of 8", 16, 8, 8),
)
"""30 layers of 96 KiB are a block of 128 tokens of SmolLM2-135M in bf16."""


ENGINES: tuple[Engine, ...] = ("numba", "numpy") if find_spec("numba") else ("numpy",)


@click.command("copy")
@click.option("--mib", default=1024, help="Memory a side; far beyond the caches.")
@click.option("--repeats", default=7, help="Timings of each case.")
@click.option("--huge-pages/--small-pages", default=True, help="Of both sides.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def main(mib: int, repeats: int, huge_pages: bool, as_json: bool) -> None:
    """Copies of KV blocks in host memory, one thread."""
    source, target = (_memory(mib << 20, huge_pages) for _ in range(2))
    works = {
        f"{case.name} ({engine})": _work(case, engine, source, target)
        for case in CASES
        for engine in ENGINES
    }
    found = speeds(_contiguous(source, target), works, repeats)
    print(json.dumps(_plain(found)) if as_json else "\n".join(_table(found)))


def _memory(nbytes: int, huge_pages: bool) -> npt.NDArray[np.uint8]:
    """Memory that has been written to: no timing shall pay for page faults."""
    pages = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)
    memory = np.frombuffer(pages, np.uint8)
    memory[:] = 1
    return memory


def _contiguous(source: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8]) -> Work:
    half = len(source) // 2

    def work() -> int:
        np.copyto(target[:half], source[:half])
        return half

    return work


def _work(
    case: Case,
    engine: Engine,
    source: npt.NDArray[np.uint8],
    target: npt.NDArray[np.uint8],
) -> Work:
    nbytes = case.block_kib << 10
    blocks = len(source) // (nbytes * case.regions)
    copier = BlockCopier(
        _regions(source, nbytes, blocks, case.regions, case.source),
        _regions(target, nbytes, blocks, case.regions, case.target),
        engine=engine,
    )
    rng = np.random.default_rng(0)
    source_ids = _half_of(blocks, case.source_run, rng)
    target_ids = _half_of(blocks, case.target_run, rng)
    return lambda: copier.copy(source_ids, target_ids)


def _regions(
    memory: npt.NDArray[np.uint8], nbytes: int, blocks: int, regions: int, shape: Shape
) -> list[Region]:
    layers = shape == "layers"
    apart = nbytes * blocks if layers else nbytes
    stride = nbytes if layers else nbytes * regions
    address = memory.ctypes.data
    return [Region(address + i * apart, stride, nbytes, blocks) for i in range(regions)]


def _half_of(blocks: int, run: int, rng: np.random.Generator) -> Ids:
    """Half the ids 0 to blocks-1, in runs of `run` at random places."""
    if not run:
        return np.arange(blocks // 2)
    starts = rng.permutation(blocks // run)[: blocks // run // 2] * run
    return (starts[:, None] + np.arange(run)).ravel()


def _plain(found: dict[str, Speed]) -> dict[str, dict[str, float]]:
    return {name: speed._asdict() for name, speed in found.items()}


def _table(found: dict[str, Speed]) -> Iterator[str]:
    yield f"{'copy':42}  GB/s  of a contiguous copy"
    for name, speed in found.items():
        yield f"{name:42} {speed.bytes_per_second / 1e9:5.1f} {speed.share:6.0%}"
