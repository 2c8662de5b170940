"""What one step has to store, group by group, before room is made for it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvplugin.connectors.offload.admissions import Admission
from kvplugin.connectors.offload.chunks import Chunk, Chunking
from kvplugin.connectors.offload.host_tier import HostTier
from kvplugin.connectors.offload.requests import RequestState
from kvplugin.connectors.offload.store_filter import StoreFilter


@dataclass(slots=True)
class StepPart:
    """What a step has of one group."""

    cut: Chunking
    wanted: list[Chunk]
    """Chunks that are not in host memory and are to get there, ascending."""
    engine: Callable[[Chunk], Sequence[int]]
    """Engine blocks of a chunk."""
    behind: Sequence[Chunk] = ()
    """Dense: all from the first missing chunk on."""
    there: Mapping[int, int] = field(default_factory=dict)
    """Not dense: slots of the blocks that are there by the tokens up to their ends,
    ascending, each with a reference of its own."""


class StepParts:
    """Finds them, and asks the offload policy.

    Args:
        tier: what is there already.
        wanted: the offload policy.
        refuse: hears of what it does not want: so many chunks of a group.
    """

    def __init__(
        self,
        tier: HostTier,
        wanted: StoreFilter,
        refuse: Callable[[Chunking, int], None],
    ) -> None:
        self._tier = tier
        self._wanted = wanted
        self._refuse = refuse

    def dense(
        self, state: RequestState, admission: Admission, cut: Chunking, numbers: range
    ) -> StepPart:
        """Of a dense group whose new chunks are `numbers`. Those before the first
        missing one are held: room must not be made of them."""
        slots = self._tier.run(cut, state.request, numbers)
        head = numbers.start + len(slots)
        ends = ends_of(cut, range(numbers.start, head))
        admission.holding.hold(ends, cut.index, slots)
        behind = list(cut.of(state.request, head, numbers.stop))
        missing = [chunk for chunk in behind if self._tier.find(chunk.key) is None]
        wanted = self._dense_wanted(state, admission, cut, missing)
        return StepPart(cut, wanted, lambda c: admission.blocks(cut, c), behind)

    def _dense_wanted(
        self,
        state: RequestState,
        admission: Admission,
        cut: Chunking,
        missing: list[Chunk],
    ) -> list[Chunk]:
        """Of these chunks those that the offload policy wants, up to the first one that
        it does not. It hears of those behind a hole too."""
        if not missing:
            return missing
        mask = self._wanted.mask(state.request, cut, missing)
        count = mask.index(False) if False in mask else len(mask)
        if count < len(missing):
            start = missing[count].number * cut.tokens
            hole = admission.hole
            admission.hole = start if hole is None else min(hole, start)
        wanted = _before(cut, missing[:count], admission.hole)
        self._refuse(cut, len(missing) - len(wanted))
        return wanted

    def sparse(
        self,
        state: RequestState,
        admission: Admission,
        cut: Chunking,
        found: Mapping[int, int],
    ) -> StepPart:
        """Of a group that is not dense.

        Args:
            state: of the request.
            admission: of the request.
            cut: the group.
            found: engine blocks that the step leaves, by number.
        """
        chunks = [
            chunk
            for number in sorted(found)
            for chunk in cut.of(state.request, number, number + 1)
        ]
        there = self.find(cut, chunks)
        self._tier.hold(cut.index, list(there.values()))
        missing = [c for c in chunks if (c.number + 1) * cut.tokens not in there]
        wanted = self._sparse_wanted(state, admission, cut, missing)
        return StepPart(cut, wanted, lambda c: (found[c.number],), there=there)

    def _sparse_wanted(
        self,
        state: RequestState,
        admission: Admission,
        cut: Chunking,
        missing: list[Chunk],
    ) -> list[Chunk]:
        if not missing:
            return missing
        mask = self._wanted.mask(state.request, cut, missing)
        wanted = [c for c, is_wanted in zip(missing, mask, strict=True) if is_wanted]
        wanted = _before(cut, wanted, admission.hole)
        self._refuse(cut, len(missing) - len(wanted))
        return wanted

    def find(self, cut: Chunking, chunks: Iterable[Chunk]) -> dict[int, int]:
        """Slots of those of the chunks that are there or being written, by the tokens
        up to their ends."""
        found = [(c.number, self._tier.find(c.key)) for c in chunks]
        return {(number + 1) * cut.tokens: slot for number, slot in found if slot}


def ends_of(cut: Chunking, numbers: range) -> range:
    """Tokens up to the ends of a group's chunks."""
    return range(
        (numbers.start + 1) * cut.tokens, (numbers.stop + 1) * cut.tokens, cut.tokens
    )


def _before(cut: Chunking, chunks: list[Chunk], hole: int | None) -> list[Chunk]:
    """Those of the chunks that end before a hole, or where it begins."""
    if hole is None:
        return chunks
    return [chunk for chunk in chunks if (chunk.number + 1) * cut.tokens <= hole]
