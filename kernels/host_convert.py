"""Blocks of one page layout into blocks of another, in host memory.

The twin of `BlockCopier` (`host.py`) where a block is not the same bytes on both
sides: NHD and HND, other block sizes, some of the heads. What goes where is planned
by `kvplugin.layout.plan_conversion`; here it is done, by numba in one call a job or
by numpy, at a third of the speed.
"""

from kvplugin.kernels import _numpy_convert, _numpy_copy
from kvplugin.kernels.engines import Engine, choose
from kvplugin.kernels.ids import AnyIds, checked_pairs
from kvplugin.kernels.region import MAX_BLOCKS, Copy, Region, join_neighbours
from kvplugin.layout import Conversion, KVLayout
from kvplugin.layout.conversion import Side


class BlockConverter:
    """Executes a conversion between two memories.

    The converter keeps addresses, not memory: the caller keeps both sides alive, and
    keeps others from writing to what is being read. Several threads may convert at
    once as long as their target chunks differ. The first converter of a process
    compiles the numba engine or reads it from numba's cache; `convert` never
    compiles.

    Args:
        conversion: the plan. Where it copies whole runs, it is executed as by a
            `BlockCopier`, which joins blocks that follow each other.
        source_address: what its source's offsets count from.
        target_address: the same for its target; the blocks must not overlap those
            of the source.
        engine: ``"auto"`` takes numba where it can be imported.

    Raises:
        ValueError: an address is not positive, or a side has more than `MAX_BLOCKS`
            chunks.
        ConfigError: `engine` is unknown, or is numba where numba can't be used.
    """

    def __init__(
        self,
        conversion: Conversion,
        source_address: int,
        target_address: int,
        *,
        engine: Engine = "auto",
    ) -> None:
        self._source_count, self._target_count = chunk_counts(
            conversion, source_address, target_address
        )
        self._chunk_bytes = conversion.chunk_bytes
        self._convert = _engine_for(conversion, source_address, target_address, engine)

    @property
    def chunk_bytes(self) -> int:
        """Bytes that move with one chunk."""
        return self._chunk_bytes

    def convert(self, source_chunks: AnyIds, target_chunks: AnyIds) -> int:
        """Carry chunk source_chunks[i] to chunk target_chunks[i], for every i.

        Chunks move in no particular order; nothing moves unless all ids are good.
        `Conversion.pair_chunks` makes the ids from rows of blocks.

        Args:
            source_chunks: flat; an id may appear more than once.
            target_chunks: flat and as many, each at most once.

        Returns:
            The bytes moved; 0 for no chunks.

        Raises:
            ValueError: ids are not flat lists of integers of one length, are out of
                range, or a target id is repeated.
        """
        sources, targets = checked_pairs(
            source_chunks,
            target_chunks,
            self._source_count,
            self._target_count,
            "chunks",
        )
        if len(targets):
            self._convert(sources, targets)
        return len(targets) * self._chunk_bytes


def warm_up() -> None:
    """Compile what the first converter of this process would have to compile."""
    choose("auto", "_numba_convert", _numpy_convert)


def chunk_counts(
    conversion: Conversion, source_address: int, target_address: int
) -> tuple[int, int]:
    """Chunks of both sides of a conversion between two memories.

    Raises:
        ValueError: an address is not positive, or a side has more than `MAX_BLOCKS`
            chunks.
    """
    for name, address in (("source", source_address), ("target", target_address)):
        if address <= 0:
            raise ValueError(f"{name}_address {address} is not positive")
    sources = conversion.source.num_blocks * conversion.source_chunks
    targets = conversion.target.num_blocks * conversion.target_chunks
    if max(sources, targets) > MAX_BLOCKS:
        raise ValueError(
            f"{sources} source chunks or {targets} target chunks are more than "
            f"{MAX_BLOCKS}"
        )
    return sources, targets


def _engine_for(
    conversion: Conversion, source_address: int, target_address: int, engine: Engine
) -> Copy:
    bound: Copy
    if conversion.copies_whole_runs:
        pairs = [
            (
                _region(source_address, box.source, box.nbytes, conversion.source),
                _region(target_address, box.target, box.nbytes, conversion.target),
            )
            for box in conversion.boxes
        ]
        copies = choose(engine, "_numba_copy", _numpy_copy)
        bound = copies.bind(join_neighbours(pairs))
    else:
        converts = choose(engine, "_numba_convert", _numpy_convert)
        bound = converts.bind(conversion, source_address, target_address)
    return bound


def _region(address: int, side: Side, nbytes: int, layout: KVLayout) -> Region:
    # A single block may have any stride, as nothing follows it.
    stride = max(side.block_stride, nbytes)
    return Region(address + side.offset, stride, nbytes, layout.num_blocks)
