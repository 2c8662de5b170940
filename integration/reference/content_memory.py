"""The content of one layer's memory, and what writes and reads it with the tensors."""

from collections.abc import Mapping, Sequence
from typing import Final

import torch

from kvplugin.block import NULL_BLOCK
from kvplugin.integration.reference.history import Spans, Tensors
from kvplugin.integration.reference.paged import PagedTokens, RowStore
from kvplugin.integration.reference.states import PagedStates, StatePlan
from kvplugin.testing.content import ContentModel
from kvplugin.testing.rules import GroupModel
from kvplugin.testing.slots import STATE_SLOT, Content, ContentError, Slot, Void
from kvplugin.worker.table_shape import TableShape
from kvplugin.worker.zeroing import Zeroer

_SINK: Final = "sink"
"""Who wrote the rows that all requests share."""


class LayerContent(ContentModel):
    """One layer's blocks on one rank, by place instead of by row.

    Args:
        layer: its name.
        group: of the layer.
        groups: all groups.
        num_blocks: blocks of the pool.
    """

    def __init__(
        self, layer: str, group: int, groups: Sequence[GroupModel], num_blocks: int
    ) -> None:
        super().__init__(groups, num_blocks)
        self.layer = layer
        self.group = groups[group]

    def put(self, block: int, place: int, content: Content) -> None:
        """Somebody writes a slot.

        Raises:
            ContentError: the block is null, or nobody's.
        """
        self._check("writes", block, content)
        self._blocks[block].slots[place] = content

    def expect(self, block: int, place: int, wanted: Content) -> None:
        """Somebody reads a slot.

        Raises:
            ContentError: it holds something else, or the block is null or nobody's.
        """
        self._check("reads", block, wanted)
        found = self.content(block, place)
        same = found is wanted
        if isinstance(found, Slot) and isinstance(wanted, Slot):
            same = found[:3] == wanted[:3]  # whoever wrote it
        if not same:
            raise ContentError(
                f"layer {self.layer}, block {block}, slot {place} is read as {wanted} "
                f"and holds {found}"
            )

    def _check(self, does: str, block: int, content: Content) -> None:
        if block == NULL_BLOCK or not self._is_used(block):
            what = "the null block" if block == NULL_BLOCK else f"block {block} (free)"
            raise ContentError(f"layer {self.layer} {does} {what} for {content}")


class WatchedRows:
    """A `RowStore` that checks the slots which are read.

    Args:
        store: the layer's rows.
        memory: their content.
        shape: of the group's block table.
    """

    def __init__(
        self, store: RowStore, memory: LayerContent, shape: TableShape
    ) -> None:
        self.memory = memory
        self.next: Sequence[Slot | None] | None = None
        """The tokens of the next call, or more; None for the rows of the sinks."""
        self._store = store
        self._size = shape.kernel_block_size
        self._ratio = shape.ratio

    def write(self, rows: Tensors, slots: torch.Tensor) -> None:
        """See `RowStore.write`."""
        self._store.write(rows, slots)
        for slot, token in zip(slots.tolist(), self._take(len(slots)), strict=True):
            if slot >= 0 and token is not None:
                self.memory.put(*self._place(*divmod(slot, self._size)), token)

    def read(self, blocks: torch.Tensor, offsets: torch.Tensor) -> Tensors:
        """See `RowStore.read`."""
        places = zip(blocks.tolist(), offsets.tolist(), strict=True)
        for place, token in zip(places, self._take(len(blocks)), strict=True):
            if token is not None:
                self.memory.expect(*self._place(*place), token)
        return self._store.read(blocks, offsets)

    def _take(self, count: int) -> Sequence[Slot | None]:
        wanted, self.next = self.next, None
        if wanted is None:
            group = self.memory.group.index
            wanted = [Slot(group, at, at, _SINK) for at in range(count)]
        if len(wanted) < count:
            raise ContentError(
                f"layer {self.memory.layer}: {count} rows are asked for, there are "
                f"only {len(wanted)}: {wanted}"
            )
        return wanted[:count]

    def _place(self, kernel_block: int, offset: int) -> tuple[int, int]:
        """Block of the pool, and slot in it."""
        block, part = divmod(kernel_block, self._ratio)
        return block, part * self._size + offset


class WatchedTokens:
    """A `TokenHistory` that says which tokens it writes and means to read.

    Args:
        history: what it watches.
        store: what the history writes to and reads from.
        new: the tokens that are appended; None for those that have no slot.
        seen: of each request its tokens, from the first one on.
        firsts: of each the first token that the layer's spec lets it see.
    """

    def __init__(
        self,
        history: PagedTokens,
        store: WatchedRows,
        new: Sequence[Slot | None],
        seen: Sequence[Sequence[Slot]],
        firsts: Sequence[int],
    ) -> None:
        self._history = history
        self._store = store
        self._new = new
        self._seen = seen
        self._firsts = firsts

    def append(self, *rows: torch.Tensor) -> None:
        """See `TokenHistory.append`."""
        self._store.next = self._new
        self._history.append(*rows)

    def read(self, index: int, first: int) -> Tensors:
        """See `TokenHistory.read`.

        Raises:
            ContentError: it reads what is not the request's, or further back than the
                group's spec keeps.
        """
        if first < self._firsts[index]:
            raise ContentError(
                f"layer {self._store.memory.layer} reads tokens from {first} on, and "
                f"sees none before {self._firsts[index]}"
            )
        self._store.next = self._seen[index][first:]
        return self._history.read(index, first)

    def read_sink(self) -> Tensors:
        """See `TokenHistory.read_sink`."""
        self._store.next = None
        return self._history.read_sink()


class WatchedStates:
    """A `StateHistory` that checks the states which are read.

    Args:
        history: what it watches.
        memory: the layer's content.
        plans: where the requests' states are.
        spans: the requests.
        labels: of each request's tokens.
    """

    def __init__(
        self,
        history: PagedStates,
        memory: LayerContent,
        plans: Sequence[StatePlan],
        spans: Spans,
        labels: Sequence[Sequence[int]],
    ) -> None:
        self._history = history
        self._memory = memory
        self._plans = plans
        self._labels = labels
        for index, span in enumerate(spans):
            wanted = self._state(index, span.num_computed)
            memory.expect(plans[index].source, STATE_SLOT, wanted)

    def _state(self, index: int, num_tokens: int) -> Content:
        """The state of a request after so many tokens."""
        if not num_tokens:
            return Void.ZEROED
        last = num_tokens - 1
        return Slot(self._memory.group.index, last, self._labels[index][last], "")

    def load(self, index: int) -> Tensors | None:
        """See `StateHistory.load`."""
        return self._history.load(index)

    def keep(self, index: int, num_tokens: int, state: Tensors) -> None:
        """See `StateHistory.keep`."""
        self._history.keep(index, num_tokens, state)
        for block in self._plans[index].targets.get(num_tokens, ()):
            self._memory.put(block, STATE_SLOT, self._state(index, num_tokens))


class WatchedZeroer:
    """A `Zeroer` that zeroes the content too.

    Args:
        zeroer: writes the zeros.
        memories: of the rank's layers.
    """

    def __init__(self, zeroer: Zeroer, memories: Mapping[str, LayerContent]) -> None:
        self._zeroer = zeroer
        self._memories = memories

    def zero(self, ids: Sequence[int]) -> int:
        """See `Zeroer.zero`."""
        for memory in self._memories.values():
            memory.zero(ids)
        return self._zeroer.zero(ids)
