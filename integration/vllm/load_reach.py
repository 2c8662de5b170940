"""What a failed load reaches: rows of blocks, and all that was computed after a bad
block of any of them. Reads what vLLM's scheduler hands to its workers; imports
nothing of vLLM."""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Row:
    """The blocks of a request as a step reads them: ids by group, by place."""

    request_id: str
    groups: Sequence[Sequence[int]]

    def first(self, ids: Set[int], block_sizes: Sequence[int]) -> int | None:
        """The first token whose block is one of `ids`; None if no block is."""
        places = (
            size * next(i for i, block in enumerate(blocks) if block in ids)
            for blocks, size in zip(self.groups, block_sizes, strict=True)
            if not ids.isdisjoint(blocks)
        )
        return min(places, default=None)

    def after(self, token: int, block_sizes: Sequence[int]) -> set[int]:
        """Blocks of every group that hold `token` or later ones."""
        return {
            block
            for blocks, size in zip(self.groups, block_sizes, strict=True)
            for block in blocks[token // size :]
        }


@dataclass(frozen=True, slots=True)
class Reach:
    """What was computed from bad blocks."""

    blocks: set[int]
    """The bad ones and all that follow them in a row."""
    requests: dict[str, int]
    """Requests whose row holds one, each with its first token that is not sound."""


def admitted_rows(outputs: Iterable[Any]) -> list[Row]:
    """Rows of the requests that steps under way admitted, also where they ended since.

    Args:
        outputs: vLLM's `SchedulerOutput` of each step, the oldest first.
    """
    rows: list[Row] = []
    current: dict[str, list[list[int]]] = {}

    def begin(name: str, groups: Sequence[Sequence[int]]) -> None:
        current[name] = [list(blocks) for blocks in groups]
        rows.append(Row(name, current[name]))

    for output in outputs:
        for new in output.scheduled_new_reqs:
            begin(new.req_id, new.block_ids)
        cached = output.scheduled_cached_reqs
        for name, groups in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if groups is None:
                continue
            if name in cached.resumed_req_ids:
                begin(name, groups)
            elif name in current:
                for blocks, more in zip(current[name], groups, strict=True):
                    blocks.extend(more)
    return rows


def reached(
    bad: Set[int], rows: Sequence[Row], block_sizes: Sequence[int], null_block: int
) -> Reach:
    """Follow bad blocks through all rows until nothing is added.

    One pass does not do: a window's row no longer holds the blocks before it, so that
    only a block computed from bad ones connects it with them.

    Args:
        bad: ids of blocks whose content is wrong.
        rows: of all requests that may hold one.
        block_sizes: tokens of a block, by group.
        null_block: stands in rows for no block.
    """
    blocks, requests = set(bad) - {null_block}, dict[str, int]()
    size = -1
    while size != len(blocks):
        size = len(blocks)
        for row in rows:
            token = row.first(blocks, block_sizes)
            if token is None:
                continue
            requests[row.request_id] = min(token, requests.get(row.request_id, token))
            blocks |= row.after(token, block_sizes) - {null_block}
    return Reach(blocks, requests)
