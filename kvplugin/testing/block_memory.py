"""Whole blocks of the content model: who has them, what they hold, what copies them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvplugin.block import NULL_BLOCK
from kvplugin.testing.slots import BlockContent, Content, ContentError, Void


@dataclass(slots=True)
class Block:
    """One block, slot by slot."""

    fill: Void = Void.UNWRITTEN
    """What slots without an entry hold."""
    slots: dict[int, Content] = field(default_factory=dict)
    grant: int = 0
    """How often it was handed out."""


class BlockMemory:
    """The memory of one pool, on one rank.

    Args:
        num_blocks: blocks of the pool, the null block included.
        in_use: whether a block has an owner; without it every block has.
    """

    def __init__(
        self, num_blocks: int, in_use: Callable[[int], bool] | None = None
    ) -> None:
        self.in_use = in_use
        self._blocks = [Block() for _ in range(num_blocks)]

    # -- the pool ------------------------------------------------------------------

    def grants(self) -> list[int]:
        """How often each block was handed out so far."""
        return [block.grant for block in self._blocks]

    def handed_out(self, blocks: Iterable[int]) -> None:
        """The blocks have a new owner: what they held is nobody's to read."""
        for block in blocks:
            self._blocks[block].grant += 1
            self._fill(block, Void.POISONED)

    def poison(self, blocks: Iterable[int]) -> None:
        """The blocks are free and hold nothing that can be hit."""
        for block in blocks:
            self._fill(block, Void.POISONED)

    def zero(self, blocks: Iterable[int], grants: Sequence[int] | None = None) -> None:
        """Zero whole blocks, as `SchedulerOutput.new_block_ids_to_zero` asks for.

        A free block that holds nothing stays as it is: zeros there harm nobody, and
        nobody may read them.

        Args:
            blocks: which ones.
            grants: `grants()` of the time at which that was decided; None: not checked.

        Raises:
            ContentError: one is null, or was handed to somebody else since.
        """
        for block in blocks:
            if block == NULL_BLOCK:
                raise ContentError("the null block is to be zeroed")
            if grants is not None and grants[block] != self._blocks[block].grant:
                raise ContentError(
                    f"block {block} is zeroed, and was handed to somebody else"
                )
            if self._is_used(block) or not self.is_void(
                block, Void.UNWRITTEN, Void.POISONED
            ):
                self._fill(block, Void.ZEROED)

    def invalidate(self, blocks: Iterable[int]) -> None:
        """A load into the blocks failed in a way that the engine hears of later."""
        for block in blocks:
            self._fill(block, Void.INVALID)

    def content(self, block: int, place: int) -> Content:
        """What a slot holds; for the messages and checks of tests."""
        found = self._blocks[block]
        return found.slots.get(place, found.fill)

    def is_void(self, block: int, *kinds: Void) -> bool:
        """Whether a whole block holds nothing but one of these."""
        held = self._blocks[block]
        return held.fill in kinds and all(c in kinds for c in held.slots.values())

    # -- transfers -----------------------------------------------------------------

    def store(self, blocks: Iterable[int]) -> list[BlockContent]:
        """Copies of blocks as they are now.

        Raises:
            ContentError: one is null or free: nobody keeps its bytes.
        """
        copies = []
        for block in blocks:
            self._check_transfer("reads", block)
            held = self._blocks[block]
            copies.append(BlockContent(held.fill, dict(held.slots)))
        return copies

    def load(
        self,
        payload: Sequence[BlockContent],
        blocks: Sequence[int],
        *,
        num_slots: int | None = None,
    ) -> None:
        """Overwrite blocks with copies.

        Args:
            payload: from `store`, one a block.
            blocks: where to.
            num_slots: slots of each block that arrive, the first ones; None for all.
                The others keep what they held.

        Raises:
            ContentError: a block is null or free.
        """
        for copy, block in zip(payload, blocks, strict=True):
            self._check_transfer("writes", block)
            held = self._blocks[block]
            if num_slots is None:
                held.fill, held.slots = copy.fill, dict(copy.slots)
            else:
                for place in range(num_slots):
                    held.slots[place] = copy.slots.get(place, copy.fill)

    # -- inside --------------------------------------------------------------------

    def _fill(self, block: int, void: Void) -> None:
        self._blocks[block].fill = void
        self._blocks[block].slots = {}

    def _is_used(self, block: int) -> bool:
        return self.in_use is None or self.in_use(block)

    def _check_transfer(self, does: str, block: int) -> None:
        if block == NULL_BLOCK:
            raise ContentError(f"a transfer {does} the null block")
        if not self._is_used(block):
            raise ContentError(f"a transfer {does} block {block}, which is free")
