"""The engine's blocks as a connector gets them, with an account of what it took."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from kvplugin.block import NULL_BLOCK
from kvplugin.contract import EngineBlocks, MeetsPeers, PeerRequestView


class CountedBlocks:
    """`contract.EngineBlocks` that knows what is still referenced.

    Args:
        blocks: the engine's.
    """

    def __init__(self, blocks: EngineBlocks) -> None:
        self._blocks = blocks
        self._taken: Counter[int] = Counter()

    @property
    def taken(self) -> list[int]:
        """Blocks that the connector references, one entry a reference."""
        return list(self._taken.elements())

    def acquire(self, ids: Sequence[int]) -> None:
        """See `contract.EngineBlocks`."""
        self._blocks.acquire(ids)
        self._taken.update(_without_null(ids))

    def release(self, ids: Sequence[int]) -> None:
        """See `contract.EngineBlocks`.

        Raises:
            AssertionError: the connector does not have these references.
        """
        given_back = Counter(_without_null(ids))
        foreign = given_back - self._taken
        if foreign:
            raise AssertionError(
                f"the connector releases blocks {sorted(foreign)}, which it does not "
                f"reference"
            )
        self._taken -= given_back
        self._blocks.release(ids)

    def forget(self, ids: Sequence[int]) -> None:
        """See `contract.EngineBlocks`."""
        self._blocks.forget(ids)


def _without_null(ids: Sequence[int]) -> list[int]:
    """Nobody counts references to the null block."""
    return [block for block in ids if block != NULL_BLOCK]


class CountedHalf:
    """A scheduler half that is given `CountedBlocks`; everything else is its own.

    Args:
        half: implements `contract.SchedulerHalf`.
    """

    def __init__(self, half: Any) -> None:
        self._half = half
        self.counted: CountedBlocks | None = None

    def bind_blocks(self, blocks: EngineBlocks) -> None:
        """See `contract.SchedulerHalf`."""
        self.counted = CountedBlocks(blocks)
        self._half.bind_blocks(self.counted)

    @property
    def taken(self) -> list[int]:
        """Blocks that the half references."""
        return [] if self.counted is None else self.counted.taken

    def __getattr__(self, name: str) -> Any:
        return getattr(self._half, name)


class CountedPeers(CountedHalf):
    """The same for a half that is a `contract.MeetsPeers`: an engine looks for these
    methods where Python does not ask `__getattr__`."""

    def meet(self, introductions: Mapping[int, bytes]) -> None:
        """See `contract.MeetsPeers`, as what follows."""
        self._half.meet(introductions)

    def arrived(self, request: PeerRequestView) -> Any:
        return self._half.arrived(request)

    def handover(self, *args: Any) -> Any:
        return self._half.handover(*args)


def counted(half: Any) -> CountedHalf:
    """Count what a scheduler half references."""
    return (CountedPeers if isinstance(half, MeetsPeers) else CountedHalf)(half)
