"""What is in a block, as far as a test can tell: the content model.

The memory of one pool, shared by all groups. Each slot of a block remembers whose bytes
it holds. Whoever reads a slot says which bytes it must find; a stale, foreign, poisoned
or never written slot is a `ContentError` on the spot, where a real engine would go on
with wrong numbers. So is a write to the null block, or to a block that was handed to
somebody else meanwhile.

    memory = ContentModel(group_models(config), config.num_blocks)
    watch_pool(manager.block_pool, memory)       # poisons what is freed or evicted
    row = Row("r0", block_ids, memory.grants())
    memory.write(0, row, 0, histories)           # histories: see `rules.Identity`
    memory.read(0, row, range(len(histories)), histories)
"""

from collections.abc import Callable, Iterable, Sequence

from kvplugin.block import NULL_BLOCK
from kvplugin.testing.block_memory import BlockMemory
from kvplugin.testing.rules import GroupModel
from kvplugin.testing.slots import (
    STATE_SLOT,
    WRONG,
    ContentError,
    Row,
    Slot,
    Void,
    describe,
)


class ContentModel(BlockMemory):
    """One rank's KV memory.

    Args:
        groups: what each group reads (`rules.group_models`).
        num_blocks: blocks of the pool, the null block included.
        in_use: whether a block has an owner; without it every block has.
        strict: raise on a wrong read. If not, `read` returns `WRONG` for it, and the
            toy model's outputs tell.
    """

    def __init__(
        self,
        groups: Sequence[GroupModel],
        num_blocks: int,
        *,
        in_use: Callable[[int], bool] | None = None,
        strict: bool = True,
    ) -> None:
        super().__init__(num_blocks, in_use)
        self.groups = tuple(groups)
        self.strict = strict

    # -- layers that keep tokens ---------------------------------------------------

    def write(self, group: int, row: Row, start: int, histories: Sequence[int]) -> None:
        """The bytes of consecutive tokens from position `start` on; a history of
        `WRONG` marks bytes computed from those of a failed load.

        Raises:
            ContentError: a block is null, missing, or not the request's.
        """
        for position, history in enumerate(histories, start):
            index, place = divmod(position, self.groups[group].block_size)
            block = self._own_block(group, row, index, position)
            slot = Slot(group, position, history, row.request_id)
            self._blocks[block].slots[place] = (
                Void.INVALID if history == WRONG else slot
            )

    def scribble(self, group: int, row: Row, start: int, stop: int) -> None:
        """A draft model uses the slots of positions [start, stop), as far as the row
        reaches: a request gets no lookahead slots when it is admitted.

        Raises:
            ContentError: a block is null, or not the request's.
        """
        size = self.groups[group].block_size
        for position in range(start, min(stop, len(row.blocks) * size)):
            index, place = divmod(position, size)
            block = self._own_block(group, row, index, position)
            self._blocks[block].slots[place] = Void.DRAFTED

    def read(
        self, group: int, row: Row, positions: Iterable[int], histories: Sequence[int]
    ) -> list[int]:
        """Read slots, which must hold `histories[position]`.

        Returns:
            The histories found, `WRONG` for invalid bytes.

        Raises:
            ContentError: a slot holds something else, or there is none.
        """
        found = []
        size = self.groups[group].block_size
        for position in positions:
            index, place = divmod(position, size)
            wanted = histories[position]
            found.append(self._read(group, row, index, place, position, wanted))
        return found

    # -- layers that keep a state --------------------------------------------------

    def write_state(
        self, group: int, row: Row, index: int, position: int, history: int
    ) -> None:
        """Put the state after the token at `position` into the row's block `index`.

        Raises:
            ContentError: the block is null, missing, or not the request's.
        """
        block = self._own_block(group, row, index, position)
        slot = Slot(group, position, history, row.request_id)
        self._blocks[block].slots[STATE_SLOT] = (
            Void.INVALID if history == WRONG else slot
        )

    def read_state(
        self, group: int, row: Row, index: int, position: int, history: int
    ) -> int:
        """Read the state after exactly the tokens up to `position`, whose history it
        must hold, from the row's block `index`.

        Returns:
            The history found, `WRONG` for invalid bytes.

        Raises:
            ContentError: the block holds something else.
        """
        return self._read(group, row, index, STATE_SLOT, position, history)

    def copy_state(self, group: int, row: Row, source: int, target: int) -> None:
        """Copy a state between two blocks of a row, whatever it is (mode ``align``
        does at the start of a step that begins a block).

        Raises:
            ContentError: a block is null, missing, or not the request's.
        """
        of = self._block(group, row, source, -1)
        into = self._own_block(group, row, target, -1)
        self._blocks[into].slots[STATE_SLOT] = self.content(of, STATE_SLOT)

    # -- inside --------------------------------------------------------------------

    def _block(self, group: int, row: Row, index: int, position: int) -> int:
        """The row's block, which must be the request's."""
        where = f"request {row.request_id!r}, group {group}, position {position}"
        if not 0 <= index < len(row.blocks):
            raise ContentError(
                f"{where}: its row {list(row.blocks)} has no block {index}"
            )
        block = row.blocks[index]
        if block == NULL_BLOCK:
            raise ContentError(
                f"{where}: entry {index} of its row {list(row.blocks)} is the null "
                f"block"
            )
        held = self._blocks[block]
        if row.grants is not None and row.grants[block] != held.grant:
            raise ContentError(f"{where}: block {block} was handed to somebody else")
        return block

    def _own_block(self, group: int, row: Row, index: int, position: int) -> int:
        """The same, to be written."""
        block = self._block(group, row, index, position)
        if not self._is_used(block):
            raise ContentError(
                f"request {row.request_id!r}, group {group}, position {position}: "
                f"writes block {block}, which is free"
            )
        return block

    def _read(
        self, group: int, row: Row, index: int, place: int, position: int, wanted: int
    ) -> int:
        try:
            block = self._block(group, row, index, position)
        except ContentError:
            if self.strict:
                raise
            return WRONG
        found = self.content(block, place)
        if found is Void.INVALID or wanted == WRONG:
            return WRONG
        if isinstance(found, Slot) and found[:3] == (group, position, wanted):
            return wanted
        if self.strict:
            raise ContentError(
                f"request {row.request_id!r}, group {group}, position {position}: "
                f"block {block}, slot {place} holds {describe(found, wanted)}"
            )
        return WRONG
