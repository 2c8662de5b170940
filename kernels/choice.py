"""Which engine copies between host and device: a table of measurements.

Two engines do it. *DMA*: the card's copy engines, one descriptor a piece; they take
nothing from the step, but every piece costs a submission. *Triton*: one kernel reads
or writes pinned host memory over the bus; one launch for any number of pieces, but it
takes multiprocessors from the step.

Which is faster depends on the card, its bus, the direction and the size of a piece (a
contiguous run of bytes: a layer's part of a block), so it is measured, by `python -m
benchmarks gpu --write`, which prints rows for `MEASURED`. A card that is not in there
gets the rows of `UNMEASURED`, which are a rule with a reason and say so.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import Final, NamedTuple

from kvplugin.errors import IntegrityError
from kvplugin.kernels.streams import Direction

ANY_CARD: Final = "*"


class Engine(StrEnum):
    """Who moves the bytes."""

    DMA = "dma"
    TRITON = "triton"


class Row(NamedTuple):
    """From this size of a piece and this number of pieces on, this engine."""

    card: str
    """As `torch.cuda.get_device_name` says it."""
    direction: Direction
    piece_bytes: int
    pieces: int
    """Of one copy."""
    engine: Engine
    evidence: str
    """Figures, date and versions; for `ANY_CARD` the reason of the rule."""

    @property
    def measured(self) -> bool:
        """False: a rule for cards that nobody has measured."""
        return self.card != ANY_CARD


MEASURED: Final[tuple[Row, ...]] = ()
"""No card has been measured yet."""

_NOT_ASKED = "not measured: DMA works for any piece and takes nothing from the step"
_LOAD_AS_VLLM = (
    "not measured: vLLM 0.32 loads with a kernel from 16 pieces on and below 28 KiB a "
    "piece, by figures of an H100 on PCIe 5"
)
_STORE_AS_VLLM = (
    "not measured: vLLM 0.32 stores by DMA alone, by figures of an H100 on PCIe 5"
)

UNMEASURED: Final = (
    Row(ANY_CARD, Direction.LOAD, 0, 0, Engine.DMA, _NOT_ASKED),
    Row(ANY_CARD, Direction.LOAD, 0, 16, Engine.TRITON, _LOAD_AS_VLLM),
    Row(ANY_CARD, Direction.LOAD, 28 << 10, 0, Engine.DMA, _LOAD_AS_VLLM),
    Row(ANY_CARD, Direction.STORE, 0, 0, Engine.DMA, _STORE_AS_VLLM),
)

TABLE: Final = (*MEASURED, *UNMEASURED)


def find_row(
    card: str,
    direction: Direction,
    piece_bytes: int,
    pieces: int,
    table: Iterable[Row] = TABLE,
) -> Row:
    """The row that decides: of the card's rows, or else of any card's, those of the
    largest size that the pieces reach; of these, that of the largest number reached.

    Nothing is read into sizes or numbers below those measured: there too the rows of
    any card decide.

    Args:
        card: name of the GPU.
        direction: which way.
        piece_bytes: contiguous bytes of one piece.
        pieces: of the copy.
        table: rows in any order.

    Raises:
        ValueError: `piece_bytes` or `pieces` is not positive.
        IntegrityError: the table has no row for it, not even for any card.
    """
    if piece_bytes < 1 or pieces < 1:
        raise ValueError(f"{pieces} pieces of {piece_bytes} bytes are no copy")
    reached = [
        row
        for row in table
        if row.card in (card, ANY_CARD)
        and row.direction == direction
        and row.piece_bytes <= piece_bytes
        and row.pieces <= pieces
    ]
    if not reached:
        raise IntegrityError(f"no row for {card!r}, {direction}, {piece_bytes} bytes")
    return max(reached, key=lambda row: (row.measured, row.piece_bytes, row.pieces))


def choose(
    card: str,
    direction: Direction,
    piece_bytes: int,
    pieces: int,
    table: Iterable[Row] = TABLE,
) -> Engine:
    """The engine of `find_row`. Triton needs host memory that is pinned
    (`pinned.py`): what is not pinned goes by DMA, whatever the table says."""
    return find_row(card, direction, piece_bytes, pieces, table).engine
