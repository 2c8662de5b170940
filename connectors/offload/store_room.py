"""Room in host memory, shared out among the groups so that what is kept can be hit."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial

from kvplugin.connectors.offload.boundary import Boundaries, Holds, needed
from kvplugin.connectors.offload.chunks import Chunk, Chunking
from kvplugin.connectors.offload.host_tier import HostTier, Reservation
from kvplugin.connectors.offload.requests import RequestState
from kvplugin.connectors.offload.step_parts import StepPart


class StoreRoom:
    """Makes room for what a step has to store.

    A prefix without the window or state at its end cannot be hit, nor one of which a
    group has less than the others. Where a pool is too small for all that a step
    brings, all groups are therefore stored up to one boundary, with what that one
    needs; other blocks of windows get what room is left.

    Args:
        tier: where room is.
        boundaries: of all groups.
        skip: hears of what finds no room: so many chunks of a group.
    """

    def __init__(
        self,
        tier: HostTier,
        boundaries: Boundaries,
        skip: Callable[[Chunking, int], None],
    ) -> None:
        self._tier = tier
        self._boundaries = boundaries
        self._skip = skip

    def make(
        self, state: RequestState, parts: Sequence[StepPart], end: int
    ) -> tuple[list[Reservation], int | None]:
        """Reserve slots.

        Args:
            state: whose chunks they are.
            parts: one of each group, dense ones first.
            end: tokens up to which they go.

        Returns:
            A reservation for each part; and the boundary up to which they go, None if
            there is room for all that is dense.
        """
        last = min(self._boundaries.served(part.cut, end) for part in parts)
        boundary = self._shortened(state, parts, last)
        reservations = []
        for i, part in enumerate(parts):
            kept = part.wanted
            if boundary is not None:
                kept = kept[: _position(kept, needed(part.cut, boundary).stop)]
            if not part.cut.coverage.dense:
                room = self._room_beside(parts[i + 1 :], part, boundary or last)
                kept = kept[max(len(kept) - room, 0) :]
            self._skip(part.cut, len(part.wanted) - len(kept))
            reservations.append(self._tier.reserve(part.cut, kept))
        return reservations, boundary

    def _room_beside(
        self, others: Sequence[StepPart], part: StepPart, boundary: int
    ) -> int:
        """Slots for a part, without those that `boundary` needs of others."""
        pool = self._pool(part)
        taken = sum(_need(one, boundary) for one in others if self._pool(one) == pool)
        return max(self._tier.room(part.cut.index) - taken, 0)

    # -- a shortage ----------------------------------------------------------------

    def _shortened(
        self, state: RequestState, parts: Sequence[StepPart], last: int
    ) -> int | None:
        """The largest boundary for which there is room, 0 if nothing that could be hit
        fits; None if there is enough for all dense chunks and for what `last` needs."""
        pools = {self._pool(p) for p in parts if p.wanted and p.cut.coverage.dense}
        short = [part for part in parts if self._pool(part) in pools]
        if self._fits(short, lambda part: len(part.wanted)):
            return None
        if self._fits(short, partial(_need, boundary=last, all_dense=True)):
            return None
        unit = self._boundaries.unit
        low, high = 0, last // unit
        while low < high:
            middle = (low + high + 1) // 2
            if self._fits(short, partial(_need, boundary=middle * unit)):
                low = middle
            else:
                high = middle - 1
        return self._boundaries.largest(0, low * unit, self._will_hold(state, parts))

    def _fits(
        self, parts: Sequence[StepPart], demand: Callable[[StepPart], int]
    ) -> bool:
        """Whether every pool has room for the chunks that are in demand."""
        wanted: dict[int, int] = {}
        for part in parts:
            pool = self._pool(part)
            wanted[pool] = wanted.get(pool, 0) + demand(part)
        return all(
            wanted[self._pool(part)] <= self._tier.room(part.cut.index)
            for part in parts
        )

    def _will_hold(self, state: RequestState, parts: Sequence[StepPart]) -> Holds:
        """What is there once all that is wanted is stored."""
        wanted = {part.cut.index: {c.number for c in part.wanted} for part in parts}
        heads = {part.cut.index: part.behind[0].number for part in parts if part.behind}

        def holds(cut: Chunking, number: int) -> bool:
            if cut.coverage.dense and number < heads.get(cut.index, number + 1):
                return True
            if number in wanted[cut.index]:
                return True
            key = cut.key(state.request, number)
            return key is not None and self._tier.find(key) is not None

        return holds

    def _pool(self, part: StepPart) -> int:
        return self._tier.pool_of(part.cut.index)


def _need(part: StepPart, boundary: int, *, all_dense: bool = False) -> int:
    """How many of the wanted chunks a boundary needs."""
    if all_dense and part.cut.coverage.dense:
        return len(part.wanted)
    numbers = needed(part.cut, boundary)
    return _position(part.wanted, numbers.stop) - _position(part.wanted, numbers.start)


def _position(chunks: Sequence[Chunk], number: int) -> int:
    """Of the first chunk from `number` on."""
    return bisect_left(chunks, number, key=lambda chunk: chunk.number)
