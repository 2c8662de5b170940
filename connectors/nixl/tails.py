"""What of a request's row another engine needs to go on.

After n tokens the next one reads, of the tokens before it: all (dense groups), the
last ones (windows), those of its own chunk (chunked local attention), or the one state
that stands for all (recurrent layers). An engine that has loaded a whole prompt
computes its last token again, at place n-1, so token by token the row is offered from
what that one reads on, as far as it is still there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvplugin.connectors.coverage import Coverage, coverage_of
from kvplugin.contract import GroupInfo, GroupKind
from kvplugin.spec import cdiv


class Held(NamedTuple):
    """What a request has of one group."""

    row: Sequence[int]
    """As in `kvplugin.contract.SchedulerHalf.allocated`."""
    num_tokens: int
    """Whose KV is there."""
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Tail:
    """One group's rule."""

    group: GroupInfo
    coverage: Coverage

    @classmethod
    def of(cls, group: GroupInfo) -> "Tail":
        """The rule of a group.

        Raises:
            ConfigError: it is of a kind that cannot be handed over, or has a window of
                no tokens.
        """
        return cls(group, coverage_of(group))

    def cut(self, held: Held) -> list[int] | None:
        """The end of the row that another engine needs: its last entry is about the
        last token, and 0 stands where nothing is needed. None: something needed is
        missing."""
        end = cdiv(held.num_tokens, self.group.block_size)
        if self.group.kind is GroupKind.MAMBA:
            return _state(held, end)
        size, begins = self.group.block_size, self.coverage.begins
        offered = begins(held.num_tokens - 1) // size
        needed = begins(held.num_tokens) // size
        return _part(held.row, offered, needed, end)


def _state(held: Held, end: int) -> list[int] | None:
    """In every mode of vLLM's the state after n tokens stands in the block that token
    n-1 falls into: with a state a block of tokens, one state a step, or one state at
    all, in a block as long as any request.

    Behind it there may be blocks for drafts. Once drafts have been accepted the state
    may be in one of those until the next step moves it (`mamba_utils.py` of vLLM 0.32):
    it is then nowhere for certain.
    """
    has_decoded = held.num_tokens > held.num_prompt_tokens
    if has_decoded and len(held.row) > end:
        return None
    return _part(held.row, end - 1, end - 1, end)


def _part(row: Sequence[int], first: int, needed: int, end: int) -> list[int] | None:
    if len(row) < end or 0 in row[needed:end]:
        return None
    return list(row[first:end])
