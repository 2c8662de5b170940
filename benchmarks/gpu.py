"""How near copies of KV blocks on a GPU come to one `cudaMemcpyAsync` of as many bytes.

Between the GPU's pools, and between them and pinned host memory: kvplugin's Triton
kernels, its copy engines ("dma": `kernels/dma.py`, one descriptor a piece), and vLLM's
batch copy where vLLM is installed. `--write` prints the rows for
`kvplugin.kernels.choice.MEASURED`.
"""

import datetime
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final, Literal, Protocol

import click

from benchmarks._timing import Speed, Work, speeds
from kvplugin.kernels.choice import Engine, Row
from kvplugin.kernels.streams import Direction

Kind = Literal["gather", "scatter", "pool to pool", "permute", "load", "store"]
Timer = Callable[[Work, Mapping[str, Work], int], dict[str, Speed]]

BLOCK_KIB: Final = (16, 64, 256)
PIECES: Final = (16, 1024)
"""Of one copy between host and device: where one launch pays, and where it must."""

LEAST_MIB: Final = 2 * BLOCK_KIB[-1] * PIECES[-1] // 1024
"""Half of it is copied at once, all pieces of the largest case."""

TIE: Final = 0.05
"""Of the bus's speed: Triton must gain more than this to be chosen, since it takes
multiprocessors from the step, as DMA does not."""


@dataclass(frozen=True)
class Case:
    """Blocks of one memory go to blocks of another."""

    kind: Kind
    block_kib: int
    pieces: int = 0
    """0: half of the memory."""

    @property
    def name(self) -> str:
        """For people."""
        pieces = f" x {self.pieces}" if self.pieces else ""
        return f"{self.kind} {self.block_kib} KiB{pieces}"


CASES: Final = (
    *(
        Case(kind, kib)
        for kind in ("gather", "scatter", "pool to pool", "permute")
        for kib in BLOCK_KIB
    ),
    *(
        Case(kind, kib, pieces)
        for kind in ("load", "store")
        for kib in BLOCK_KIB
        for pieces in PIECES
    ),
)


@dataclass(frozen=True)
class Result:
    """One engine in one case."""

    kind: Kind
    block_kib: int
    pieces: int
    engine: str
    bytes_per_second: float
    share: float
    """Of one `cudaMemcpyAsync` of as many bytes the same way."""


class Device(Protocol):
    """Where the cases run. A work ends when the device has done it."""

    card: str

    def contiguous(self, case: Case) -> Work:
        """As many bytes as the case has, in one piece."""

    def engines(self, case: Case) -> Mapping[str, Work]:
        """Who can do the case."""


@click.command("gpu")
@click.option(
    "--mib",
    default=1024,
    type=click.IntRange(LEAST_MIB),
    help="Memory a side; far beyond the caches.",
)
@click.option("--repeats", default=7, help="Timings of each case.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--write", is_flag=True, help="Print rows for kernels/choice.py too.")
def main(mib: int, repeats: int, as_json: bool, write: bool) -> None:
    """Copies of KV blocks on a GPU, and between it and the host."""
    device = open_device(mib << 20)
    results = list(measure(device, CASES, repeats, speeds))
    if as_json:
        plain = [asdict(result) for result in results]
        print(json.dumps({"card": device.card, "results": plain}))
    else:
        print("\n".join(table(device.card, results)))
    if write:
        print("\n".join(source_of(rows(device.card, results, _today()))))


def open_device(nbytes: int) -> Device:
    """The first GPU.

    Raises:
        click.ClickException: there is none.
    """
    try:
        import torch
    except ImportError as error:
        raise click.ClickException(
            f"no torch ({error}): install kvplugin[worker]"
        ) from error
    if not torch.cuda.is_available():
        raise click.ClickException(
            f"no GPU: torch {torch.__version__} finds no CUDA or ROCm device. Run this "
            "where there is one; `python -m benchmarks copy` measures a CPU's copies"
        )
    from benchmarks._gpu_device import CudaDevice

    return CudaDevice(nbytes)


def measure(
    device: Device, cases: Iterable[Case], repeats: int, timer: Timer
) -> Iterator[Result]:
    """Time every engine of every case beside the contiguous copy."""
    for case in cases:
        found = timer(device.contiguous(case), device.engines(case), repeats)
        for engine, (rate, share) in found.items():
            yield Result(case.kind, case.block_kib, case.pieces, engine, rate, share)


def table(card: str, results: Iterable[Result]) -> Iterator[str]:
    """Lines for people."""
    yield f"{card:42}  GB/s  of one cudaMemcpyAsync"
    for r in results:
        name = f"{Case(r.kind, r.block_kib, r.pieces).name} ({r.engine})"
        yield f"{name:42} {r.bytes_per_second / 1e9:5.1f} {r.share:6.0%}"


def rows(card: str, results: Sequence[Result], when: str) -> Iterator[Row]:
    """What the table of `kvplugin.kernels.choice` should say of this card."""
    shares: dict[tuple[Direction, int, int], dict[str, float]] = {}
    for r in results:
        if r.kind in tuple(Direction):
            key = (Direction(r.kind), r.block_kib << 10, r.pieces)
            shares.setdefault(key, {})[r.engine] = r.share
    for (direction, nbytes, pieces), found in shares.items():
        gain = found[Engine.TRITON] - found[Engine.DMA]
        engine = Engine.TRITON if gain > TIE else Engine.DMA
        figures = ", ".join(f"{name} {share:.2f}" for name, share in found.items())
        evidence = f"{figures} of cudaMemcpyAsync; {when}"
        yield Row(card, direction, nbytes, pieces, engine, evidence)


def source_of(table_rows: Iterable[Row]) -> Iterator[str]:
    """The rows as they stand in `choice.py`, for `ruff format` to fold."""
    for row in table_rows:
        yield "    Row("
        yield f"        {json.dumps(row.card)},"
        yield f"        Direction.{row.direction.name},"
        yield f"        {row.piece_bytes},"
        yield f"        {row.pieces},"
        yield f"        Engine.{row.engine.name},"
        yield f"        {json.dumps(row.evidence)},"
        yield "    ),"


def _today() -> str:
    import torch

    runtime = torch.version.cuda or torch.version.hip
    today = datetime.date.today().isoformat()
    return f"{today}, torch {torch.__version__}, runtime {runtime}"
