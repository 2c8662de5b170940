"""Recurrent states in KV blocks: where a request's states lie in its row.

After a step a row holds the state after the last known token, the state after each
draft (a rejected token cannot be taken out of a state), and states at the ends of
blocks where the mode keeps them:

    none     | state | drafts...                    one block, however long the request
    all      | at 1 | at 2 | state |   | drafts...  one at the end of each full block
    align    | null | at 2 | state | drafts...      one where a step has ended

The scheduler ends the steps of mode ``align`` at the ends of blocks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from kvplugin.block import NULL_BLOCK
from kvplugin.integration.reference.history import Tensors
from kvplugin.spec import MambaSpec


@dataclass(frozen=True, slots=True)
class StatePlan:
    """Where one request's states of a step are, in blocks."""

    source: int
    """The state before the step. A request that begins reads the zeros of a new block,
    which is why new blocks of states are zeroed."""
    targets: Mapping[int, Sequence[int]]
    """Tokens of the request -> blocks that get the state after so many."""


@dataclass(slots=True)
class _Row:
    """A request and its last step."""

    at: int
    """Entry that holds the settled state."""
    places: list[int] = field(default_factory=list)
    """Entries for the state after the known tokens, and after each draft."""
    known: int = 0
    blocks: Sequence[int] = ()


class StateRows:
    """The requests' states in one group.

    Args:
        spec: of the group.
    """

    def __init__(self, spec: MambaSpec) -> None:
        self._spec = spec
        self._rows: dict[str, _Row] = {}

    def admit(self, req_id: str, num_computed: int) -> None:
        """A request has new rows, with the state after so many tokens in the entry of
        the block that they end in."""
        self._rows[req_id] = _Row(max(num_computed - 1, 0) // self._spec.block_size)

    def forget(self, req_id: str) -> None:
        """It has no rows any more; an unknown one is fine."""
        self._rows.pop(req_id, None)

    def plan(
        self, req_id: str, blocks: Sequence[int], start: int, known: int, end: int
    ) -> StatePlan:
        """Where a step's states are.

        Args:
            req_id: of the request.
            blocks: its row.
            start: tokens before the step.
            known: tokens after it, without drafts.
            end: tokens after it.
        """
        row, size = self._rows[req_id], self._spec.block_size
        aligned = self._spec.mamba_cache_mode == "align"
        base = ((end if aligned else known) - 1) // size
        source = blocks[row.at if start else base]
        first_draft = base + 1 if aligned else len(blocks) - self._drafts
        row.places = [base, *range(first_draft, first_draft + end - known)]
        row.known, row.blocks = known, blocks
        targets: dict[int, list[int]] = {}
        if self._spec.mamba_cache_mode == "all":
            for boundary in range((start // size + 1) * size, known, size):
                targets[boundary] = [blocks[boundary // size - 1]]
        for count, place in enumerate(row.places, known):
            targets.setdefault(count, []).append(blocks[place])
        return StatePlan(source, targets)

    @property
    def _drafts(self) -> int:
        return self._spec.num_speculative_blocks

    def settle(self, req_id: str, accepted: int) -> list[tuple[int, int]]:
        """So many drafts of the last step are final: pairs of blocks (from, to) to
        copy, of states that belong at the end of a block."""
        row, size = self._rows[req_id], self._spec.block_size
        copies = []
        for count, place in enumerate(row.places[: accepted + 1], row.known):
            index = count // size - 1
            if count % size or index == place or row.blocks[index] == NULL_BLOCK:
                continue
            copies.append((row.blocks[place], row.blocks[index]))
        row.at = row.places[accepted]
        return copies


class PagedStates:
    """The states of a step's requests in one layer.

    All are taken before the first is written.

    Args:
        tensors: the layer's, [blocks, ...] each.
        plans: where the requests' states are.
    """

    def __init__(self, tensors: Tensors, plans: Sequence[StatePlan]) -> None:
        self._tensors = tensors
        self._plans = plans
        self._sources = [
            tuple(tensor[plan.source].clone() for tensor in tensors) for plan in plans
        ]

    def load(self, index: int) -> Tensors:
        """See `StateHistory.load`."""
        return self._sources[index]

    def keep(self, index: int, num_tokens: int, state: Tensors) -> None:
        """See `StateHistory.keep`."""
        for block in self._plans[index].targets.get(num_tokens, ()):
            for tensor, value in zip(self._tensors, state, strict=True):
                tensor[block] = value


def copy_states(tensors: Sequence[torch.Tensor], source: int, target: int) -> None:
    """Copy a state from block to block."""
    for tensor in tensors:
        tensor[target] = tensor[source]
