"""A step while it is being decided."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvplugin.contract import ScheduledRequest
from kvplugin.kv_cache_blocks import KVCacheBlocks
from kvplugin.scheduler.entry import Entry
from kvplugin.scheduler.output import BlockIds, CachedRequestData, NewRequestData


@dataclass
class Share:
    """One request's part of the step."""

    entry: Entry
    num_tokens: int
    drafts: list[int]
    new_block_ids: BlockIds | None
    """What its rows grew by; None for nothing."""
    admitted: bool
    """It did not run in the step before: the workers get its whole rows."""
    heard: bool
    """The connector was told of these blocks when they were allocated."""
    num_computed_tokens: int
    """Before the step."""


@dataclass
class StepPlan:
    """Shares in the order of the batch, and the tokens still to give away."""

    number: int
    budget: int
    shares: dict[str, Share] = field(default_factory=dict)
    closed: bool = False
    """Nobody is admitted any more: somebody with blocks could not get what it needs."""
    took_back: bool = False
    """A share was withdrawn: its new blocks are free again, or somebody else's."""

    def add(
        self,
        entry: Entry,
        num_tokens: int,
        blocks: KVCacheBlocks,
        *,
        drafts: Iterable[int] = (),
        admitted: bool = False,
        heard: bool = False,
    ) -> None:
        """Schedule tokens of a request whose slots are allocated; see `Share`."""
        self.budget -= num_tokens
        self.shares[entry.id] = Share(
            entry,
            num_tokens,
            list(drafts),
            blocks.get_block_ids(allow_none=True),
            admitted,
            heard,
            entry.request.num_computed_tokens,
        )

    def withdraw(self, entry: Entry) -> Share | None:
        """Take a request out again; its share if it had one."""
        share = self.shares.pop(entry.id, None)
        if share is not None:
            self.budget += share.num_tokens
            self.took_back = True
        return share

    def progress(self, watched: Iterable[str]) -> list[ScheduledRequest]:
        """What a connector wants to hear of these requests."""
        ids = set(watched)
        return [
            ScheduledRequest(
                request_id,
                () if share.heard else share.new_block_ids or (),
                share.num_computed_tokens,
                share.num_tokens,
            )
            for request_id, share in self.shares.items()
            if request_id in ids
        ]

    def requests(
        self, rows: dict[str, BlockIds]
    ) -> tuple[list[NewRequestData], list[CachedRequestData]]:
        """Shares of requests that the workers do not know, and of those they do.

        Args:
            rows: whole rows of those admitted.
        """
        new, known = [], []
        for id_, share in self.shares.items():
            entry, computed = share.entry, share.num_computed_tokens
            tokens = list(entry.request.all_token_ids) if share.admitted else []
            if not entry.seen_by_workers:
                new.append(NewRequestData(id_, tokens, rows[id_], computed))
            elif share.admitted:
                known.append(CachedRequestData(id_, rows[id_], computed, True, tokens))
            else:
                known.append(CachedRequestData(id_, share.new_block_ids, computed))
        return new, known
