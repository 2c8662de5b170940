"""Blocks that turn out to hold no valid bytes, and who must not use them.

A synchronous load is taken for granted when its step is scheduled: its blocks have
keys, and requests of that step and of the next one may share them or compute on top of
them. If it then fails, wrong are its blocks, every block that was computed after one of
them in a row, every block computed after such a one in the row of somebody who shares
it, and so on.
"""

from collections.abc import Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet

from kvplugin.block import NULL_BLOCK
from kvplugin.scheduler.entry import Entry, Status
from kvplugin.scheduler.loads import Load
from kvplugin.scheduler.roster import Roster

Rows = tuple[list[int], ...]


def spread(
    bad: Iterable[int],
    rows: Sequence[tuple[Entry, Rows]],
    block_sizes: Sequence[int],
) -> tuple[set[int], list[Entry]]:
    """Follow wrong bytes through the rows of live requests.

    Args:
        bad: blocks without valid bytes.
        rows: live requests and their rows, a list a group.
        block_sizes: tokens of a block, by group.

    Returns:
        All wrong blocks, and the requests that hold one.
    """
    wrong = {block for block in bad if block != NULL_BLOCK}
    hit: dict[str, Entry] = {}
    grew = True
    while grew:
        grew = False
        for entry, request_rows in rows:
            first = _first_wrong_token(wrong, request_rows, block_sizes)
            if first is None:
                continue
            hit.setdefault(entry.id, entry)
            after = _blocks_from(first, request_rows, block_sizes)
            grew |= not after <= wrong
            wrong |= after
    return wrong, list(hit.values())


def _first_wrong_token(
    wrong: AbstractSet[int], rows: Rows, block_sizes: Sequence[int]
) -> int | None:
    """Where the first wrong block of any group begins."""
    starts = [
        i * size
        for row, size in zip(rows, block_sizes, strict=True)
        for i, block in enumerate(row)
        if block in wrong
    ]
    return min(starts, default=None)


def _blocks_from(token: int, rows: Rows, block_sizes: Sequence[int]) -> set[int]:
    """Blocks of all groups that hold something computed from `token` on."""
    return {
        block
        for row, size in zip(rows, block_sizes, strict=True)
        for block in row[token // size :]
        if block != NULL_BLOCK
    }


class Recovery:
    """What becomes of requests whose external tokens did not come, or were wrong.

    Args:
        roster: the requests.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster

    def load_ended(self, load: Load) -> None:
        """All ranks have reported a load for which its request still waits."""
        roster, entry = self._roster, load.entry
        request = entry.request
        computed = request.num_computed_tokens
        first = _first_wrong_token(load.failed_blocks, load.rows, roster.block_sizes)
        if first is None:
            roster.manager.cache_blocks(request, computed)
            roster.load_is_in(entry)
            return
        # What did come is cached, and will be hit when the request is admitted again.
        roster.manager.cache_blocks(request, min(first, computed))
        self._do_without(entry)

    def load_is_overdue(self, entry: Entry) -> None:
        """A request has waited long enough; its transfer goes on without it."""
        self._roster.loads.abandon(entry)
        self._do_without(entry)

    def _do_without(self, entry: Entry) -> None:
        entry.skips_external = True
        if self._roster.config.kv_load_failure_policy == "fail":
            self._roster.finish(entry, "error")
        else:
            self._roster.wait_again(entry)

    def distrust(self, invalid: Collection[int], in_flight: Iterable[Entry]) -> None:
        """A synchronous load has failed: nobody goes on from its blocks.

        Args:
            invalid: blocks that it did not fill.
            in_flight: requests of steps whose output is not known, ended ones too.
        """
        roster = self._roster
        rows = [(e, roster.rows(e)) for e in [*roster.running, *roster.loaded]]
        rows += [(e, e.rows_given_back) for e in in_flight if e.rows_given_back]
        wrong, holders = spread(invalid, rows, roster.block_sizes)
        if roster.connector is not None:
            roster.connector.distrust(set(invalid))
        roster.manager.evict_blocks(wrong)
        for entry in holders:
            if entry.status not in (Status.RUNNING, Status.LOADED):
                continue
            loaded_it = not entry.external_blocks.isdisjoint(invalid)
            entry.skips_external |= loaded_it
            if loaded_it and roster.config.kv_load_failure_policy == "fail":
                roster.finish(entry, "error")
            else:
                # Not rewound: what it computed since would have to be undone too.
                roster.preempt(entry)
