"""Blocks that turn out to hold no valid bytes, and who must not use them.

A synchronous load is taken for granted when its step is scheduled: its blocks have
keys, and requests of that step and of the next one may share them or compute on top of
them. If it then fails, wrong are its blocks, every block that was computed after one of
them in a row, every block computed after such a one in the row of somebody who shares
it, and so on.
"""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

from kvplugin.block import NULL_BLOCK
from kvplugin.scheduler.entry import Entry, Status
from kvplugin.scheduler.loads import Load
from kvplugin.scheduler.roster import Roster
from kvplugin.scheduler.rows import Rows, blocks_from, first_wrong_token


def spread(
    bad: Iterable[int], rows: Sequence[Rows], block_sizes: Sequence[int]
) -> set[int]:
    """Follow wrong bytes through the rows of requests.

    Args:
        bad: blocks without valid bytes.
        rows: of each request, a list a group.
        block_sizes: tokens of a block, by group.

    Returns:
        All wrong blocks.
    """
    wrong = {block for block in bad if block != NULL_BLOCK}
    grew = True
    while grew:
        grew = False
        for request_rows in rows:
            first = first_wrong_token(wrong, request_rows, block_sizes)
            if first is not None:
                after = set(blocks_from(first, request_rows, block_sizes))
                grew |= not after <= wrong
                wrong |= after
    return wrong


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
        first = first_wrong_token(load.failed_blocks, load.rows, roster.block_sizes)
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

    def distrust(self, invalid: AbstractSet[int], in_flight: Iterable[Entry]) -> None:
        """A synchronous load has failed: nobody goes on from its blocks.

        Args:
            invalid: blocks that it did not fill.
            in_flight: requests of steps whose output is not known, ended ones too.
        """
        roster, sizes = self._roster, self._roster.block_sizes
        rows = {e: roster.rows(e) for e in [*roster.running, *roster.loaded]}
        # Reversed, as who is put back goes to the front.
        entries = list(dict.fromkeys([*reversed(rows), *in_flight]))
        lost = [lost.rows for entry in entries for lost in entry.lost]
        wrong = spread(invalid, [*rows.values(), *lost], sizes)
        holders = [
            entry
            for entry, held in rows.items()
            if first_wrong_token(wrong, held, sizes) is not None
        ]
        if roster.connector is not None:
            roster.connector.distrust(wrong)
        roster.manager.evict_blocks(wrong)
        for entry in entries:
            if entry.status is Status.FINISHED:
                continue
            # Who has lost the blocks meanwhile must not ask for them again either.
            was_promised = entry.was_promised(invalid)
            entry.skips_external |= was_promised
            if was_promised and roster.config.kv_load_failure_policy == "fail":
                roster.finish(entry, "error")
            elif entry in holders:
                # Not rewound: what it computed since would have to be undone too.
                roster.preempt(entry)
