"""What must hold of any run, whatever happened in it: oracles 1 to 4, 6 and 8.

Each function raises `AssertionError` (`ContentError` where bytes are wrong, the core's
`IntegrityError` where its own check finds more), naming what is wrong. Oracle 5,
progress, is in `progress.py`, oracle 7, the estimator, in `estimates.py`, oracle 9,
what a policy may not do, in `policy_watch.py`.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized

from kvplugin.block import NULL_BLOCK
from kvplugin.block_pool import BlockPool
from kvplugin.contract import GroupKind, Stats
from kvplugin.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    external_hash,
)
from kvplugin.hashing import make_key
from kvplugin.manager import KVCacheManager
from kvplugin.request import RequestLike
from kvplugin.testing.content import ContentModel
from kvplugin.testing.rules import identity_of_request
from kvplugin.testing.slots import WRONG, ContentError, Row, Void


def assert_balanced(manager: KVCacheManager, **tracked: Sized) -> None:
    """Oracle 1, after everything has ended: all blocks are free, nobody references
    one, and nothing remembers a request.

    Args:
        manager: verified by its own `check` too.
        tracked: further containers that must be empty, e.g.
            ``requests=scheduler.requests``.
    """
    pool = manager.block_pool
    used = [
        block
        for block in range(1, pool.num_blocks)
        if pool.ref_count(block) and block not in pool.reserved_blocks
    ]
    if used:
        raise AssertionError(f"blocks {used} are still referenced")
    free, usable = pool.get_num_free_blocks(), pool.num_usable_blocks
    if free != usable:
        raise AssertionError(f"{free} of {usable} blocks are free")
    for owner in (manager, *manager.coordinator.single_type_managers):
        for name, ids in _request_ids(owner):
            raise AssertionError(f"{type(owner).__name__}.{name} remembers {ids}")
    for name, items in tracked.items():
        if len(items):
            raise AssertionError(f"{name} is not empty: {items}")
    manager.check()


def _request_ids(owner: object) -> Iterator[tuple[str, list[str]]]:
    """Containers of an object that are keyed by request ids and not empty."""
    for name, value in vars(owner).items():
        if isinstance(value, dict | set):
            ids = [key for key in value if isinstance(key, str)]
            if ids:
                yield name, ids


def assert_poisoned(memory: ContentModel, pool: BlockPool) -> None:
    """Oracle 2: free blocks that cannot be hit hold no bytes, the null block never
    did. Reads of poison are errors of the content model."""
    if not memory.is_void(NULL_BLOCK, Void.UNWRITTEN):
        raise ContentError("the null block was written")
    for block in range(1, pool.num_blocks):
        if pool.ref_count(block) or pool.key_of(block) is not None:
            continue
        if not memory.is_void(block, Void.UNWRITTEN, Void.POISONED):
            raise ContentError(f"block {block} is free, has no key, and holds bytes")


def assert_cache_content(
    memory: ContentModel, manager: KVCacheManager, requests: Iterable[RequestLike]
) -> int:
    """Oracle 3: what the cache would give these requests is what they would read.

    To be called when no step is in flight: blocks get their key before their bytes.

    Returns:
        Blocks verified.
    """
    verified = set()
    blocks_of = _blocks_by_key(manager.block_pool)
    for request in requests:
        histories = identity_of_request(request).histories(request.all_token_ids)
        for single in manager.coordinator.single_type_managers:
            group = single.kv_cache_group_id
            for i, block_hash in enumerate(single.coarse_hashes(request.block_hashes)):
                for block in blocks_of[make_key(block_hash, group)]:
                    _check_block(memory, group, i, block, histories)
                    verified.add(block)
    return len(verified)


def _blocks_by_key(pool: BlockPool) -> defaultdict[bytes, list[int]]:
    """All blocks under each key: the index names the first one, but the others are hit
    as soon as that one is evicted."""
    blocks_of: defaultdict[bytes, list[int]] = defaultdict(list)
    for block in range(1, pool.num_blocks):
        key = pool.key_of(block)
        if key is not None:
            blocks_of[key].append(block)
    return blocks_of


def _check_block(
    memory: ContentModel, group: int, i: int, block: int, histories: Sequence[int]
) -> None:
    model = memory.groups[group]
    row = Row("whoever hits the cache", [NULL_BLOCK] * i + [block])
    positions = range(i * model.block_size, (i + 1) * model.block_size)
    if model.keeps_tokens:
        found = memory.read(group, row, positions, histories)
    elif model.kind is GroupKind.MAMBA:
        last = positions[-1]
        found = [memory.read_state(group, row, i, last, histories[last])]
    else:
        raise ContentError(f"group {group} ({model.kind}) has a cached block {block}")
    if WRONG in found:
        raise ContentError(f"block {block} of group {group} has a key and wrong bytes")


def assert_equivalent(
    outputs: Mapping[str, Sequence[int]], expected: Mapping[str, Sequence[int]]
) -> None:
    """Oracle 4: the tokens of a run are those of the run with everything off (or of
    `reference`), request by request."""
    if outputs.keys() != expected.keys():
        odd = sorted(outputs.keys() ^ expected.keys())
        raise AssertionError(f"only one of the runs has requests {odd}")
    for request_id, wanted in expected.items():
        got = list(outputs[request_id])
        for i, (ours, theirs) in enumerate(zip(got, wanted, strict=False)):
            if ours != theirs:
                raise AssertionError(
                    f"request {request_id!r}: output token {i} is {ours}, not {theirs}"
                )
        if len(got) != len(wanted):
            raise AssertionError(
                f"request {request_id!r}: {len(got)} output tokens, not {len(wanted)}"
            )


class EventReplay:
    """Oracle 6: whoever replays the events knows what can be hit."""

    def __init__(self) -> None:
        self.stored: set[tuple[int, int]] = set()
        """(group, hash as events carry it) of blocks that can be hit."""

    def feed(self, events: Iterable[KVCacheEvent], medium: str = "GPU") -> None:
        """Take in events of one medium, in order.

        Raises:
            AssertionError: a block is removed that was not stored.
        """
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.stored.clear()
            elif isinstance(event, BlockStored) and event.medium == medium:
                group = event.group_idx or 0
                self.stored.update((group, key) for key in event.block_hashes)
            elif isinstance(event, BlockRemoved) and event.medium == medium:
                gone = {(event.group_idx or 0, key) for key in event.block_hashes}
                if not gone <= self.stored:
                    raise AssertionError(f"removed, but never stored: {event}")
                self.stored -= gone

    def assert_matches(self, pool: BlockPool, num_groups: int) -> None:
        """The replay names exactly the blocks in the pool's index."""
        index = {
            (group, external_hash(key))
            for group in range(num_groups)
            for key in pool.cached_blocks(group)
        }
        if self.stored != index:
            raise AssertionError(
                f"events alone know {sorted(self.stored - index)}, the index alone "
                f"knows {sorted(index - self.stored)}"
            )


class CounterWatch:
    """Oracle 8: counters never go back, and what goes in comes out."""

    def __init__(self) -> None:
        self.totals: dict[str, float] = {}

    def add(self, amounts: Mapping[str, float] | Stats) -> None:
        """Changes since the last call, by name.

        Raises:
            AssertionError: one is negative, or so is a gauge or an observation.
        """
        if isinstance(amounts, Stats):
            for name, values in amounts.observations.items():
                self._check(name, min(values, default=0))
            for name, value in amounts.gauges.items():
                self._check(name, value)
            amounts = amounts.counters
        for name, amount in amounts.items():
            self._check(name, amount)
            self.totals[name] = self.totals.get(name, 0) + amount

    def observe(self, totals: Mapping[str, float]) -> None:
        """Totals as they stand now.

        Raises:
            AssertionError: one is less than before, or negative.
        """
        for name, total in totals.items():
            self._check(name, total - self.totals.get(name, 0))
            self.totals[name] = total

    def assert_conserved(self, whole: str | float, *parts: str) -> None:
        """The parts make up the whole, the name of a counter or a number."""
        total = self.totals.get(whole, 0) if isinstance(whole, str) else whole
        amounts = {name: self.totals.get(name, 0) for name in parts}
        if sum(amounts.values()) != total:
            raise AssertionError(f"{whole} is {total}, its parts are {amounts}")

    @staticmethod
    def _check(name: str, amount: float) -> None:
        if amount < 0:
            raise AssertionError(f"counter {name!r} changed by {amount}")
