"""Where a worker keeps recurrent states in a row, by mode (as vLLM's workers do).

After a step that ends with `drafts` drafts to verify, a row holds the state after the
last known token, the state after each draft (a rejected token cannot be taken out of a
state), and states at the ends of blocks where the mode keeps them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvplugin.block import NULL_BLOCK
from kvplugin.testing.content import ContentModel
from kvplugin.testing.rules import GroupModel
from kvplugin.testing.slots import WRONG, Row


@dataclass(frozen=True, slots=True)
class StateStep:
    """One request's tokens in one step, in counts of tokens from its beginning."""

    start: int
    known: int
    """End of the tokens that are final."""
    end: int
    """End of the drafts."""
    histories: Sequence[int]


@dataclass(slots=True)
class StateRow:
    """The state of one request in one group."""

    group: GroupModel
    at: int = 0
    """Entry of the row that holds the settled state."""
    initial: int = field(default=0, init=False)
    """History of the state that the step goes on from."""

    def admitted(self, num_computed_tokens: int) -> None:
        """New rows, with the state after so many tokens in its natural place."""
        self.at = max(num_computed_tokens - 1, 0) // self.group.block_size

    def begin(self, memory: ContentModel, row: Row, step: StateStep) -> None:
        """Take the settled state, before anybody writes in this step."""
        if not step.start:
            return
        place = self._base(step)
        if self.group.state_mode == "align" and place != self.at:
            memory.copy_state(self.group.index, row, self.at, place)
            self.at = place
        last = step.start - 1
        self.initial = memory.read_state(
            self.group.index, row, self.at, last, step.histories[last]
        )

    @property
    def is_wrong(self) -> bool:
        """Whether the step goes on from invalid bytes."""
        return self.initial == WRONG

    def finish(
        self, memory: ContentModel, row: Row, step: StateStep, accepted: int
    ) -> None:
        """Leave the states of the step, of which so many drafts are final."""
        size, base = self.group.block_size, self._base(step)
        if self.group.state_mode == "all":
            for end in range((step.start // size + 1) * size, step.known, size):
                self._write(memory, row, end // size - 1, end, step)
        self._write(memory, row, base, step.known, step)
        places = [base]
        for j in range(1, step.end - step.known + 1):
            places.append(self._draft_place(row, base, j))
            self._write(memory, row, places[j], step.known + j, step)
        for n in range(step.known, step.known + accepted + 1):
            index = n // size - 1
            if n % size or index == places[n - step.known]:
                continue
            if row.blocks[index] != NULL_BLOCK:  # or the mode skips this block's end
                self._write(memory, row, index, n, step)
        self.at = places[accepted]

    def _base(self, step: StateStep) -> int:
        """Entry for the state after the last known token."""
        ends = step.end if self.group.state_mode == "align" else step.known
        return (ends - 1) // self.group.block_size

    def _draft_place(self, row: Row, base: int, j: int) -> int:
        if self.group.state_mode == "align":
            return base + j
        return len(row.blocks) - self.group.num_draft_states + j - 1

    def _write(
        self, memory: ContentModel, row: Row, index: int, n: int, step: StateStep
    ) -> None:
        history = WRONG if self.is_wrong else step.histories[n - 1]
        memory.write_state(self.group.index, row, index, n - 1, history)
