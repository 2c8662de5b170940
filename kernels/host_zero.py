"""Zeroing of blocks in host memory, for new blocks that must not show old bytes."""

from collections.abc import Sequence

from kvplugin.kernels import _numpy_zero
from kvplugin.kernels.engines import Engine, choose
from kvplugin.kernels.ids import AnyIds, check_range, flat_integers
from kvplugin.kernels.region import Region, join_neighbours


class BlockZeroer:
    """Zeroes blocks; a block has its id in all regions.

    The zeroer keeps addresses, not memory: the caller keeps the memory alive. The
    first one of a process compiles the numba engine or reads it from numba's cache;
    `zero` never compiles.

    Args:
        regions: of the memory whose blocks are zeroed.
        engine: ``"auto"`` takes numba where it can be imported.

    Raises:
        ValueError: there are no regions.
        ConfigError: `engine` is unknown, or is numba where numba can't be used.
    """

    def __init__(self, regions: Sequence[Region], *, engine: Engine = "auto") -> None:
        if not regions:
            raise ValueError("a zeroer needs at least one region")
        self._blocks = min(region.blocks for region in regions)
        self._block_bytes = sum(region.nbytes for region in regions)
        pairs = join_neighbours(zip(regions, regions, strict=True))
        module = choose(engine, "_numba_zero", _numpy_zero)
        self._zero = module.bind([region for region, _ in pairs])

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all regions."""
        return self._block_bytes

    def zero(self, ids: AnyIds) -> int:
        """Zero blocks, without the GIL; nothing is zeroed unless all ids are good.

        Args:
            ids: flat; an id may appear more than once.

        Returns:
            The bytes zeroed, once for each time an id appears; 0 for no ids.

        Raises:
            ValueError: ids are not a flat list of integers, or are out of range.
        """
        blocks = flat_integers(ids, "block ids")
        if len(blocks):
            check_range(blocks, self._blocks, "block id")
            self._zero(blocks)
        return len(blocks) * self._block_bytes
