"""The model's block management: rows of blocks over a pool, and its prefix cache."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvplugin import BlockPool
from kvplugin.contract import ScheduledRequest
from tests.offload.content import RankMemory
from tests.offload.setup_model import Request, Setup


class PoolBlocks:
    """Implements `kvplugin.contract.EngineBlocks` over the engine's pool."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.held: Counter[int] = Counter()

    def acquire(self, ids: Sequence[int]) -> None:
        assert all(self._pool.ref_count(block) for block in ids), "not in use"
        self._pool.touch(ids)
        self.held.update(ids)

    def release(self, ids: Sequence[int]) -> None:
        assert self.held >= Counter(ids), "released without having been acquired"
        self.held -= Counter(ids)
        self._pool.free_blocks(ids)

    def forget(self, ids: Sequence[int]) -> None:
        self._pool.evict_blocks(ids)


@dataclass
class Work:
    """What one request computes in a step; nothing while it only awaits a load."""

    request: Request
    start: int
    drafts: list[int]
    histories: list[int]
    """At each position up to the last one computed, drafts included."""
    new_blocks: list[int] = field(default_factory=list)
    """Appended by this step to a row that the connector knows."""

    @property
    def num_tokens(self) -> int:
        return max(0, len(self.histories) - self.start)

    @property
    def progress(self) -> ScheduledRequest:
        """As the connector hears of it."""
        return ScheduledRequest(
            self.request.request_id,
            (self.new_blocks,) if self.new_blocks else (),
            self.start,
            self.num_tokens,
        )


class Rows:
    """Gives requests their blocks, and keys to the blocks that are hit later.

    Args:
        setup: the kind of engine.
        pool: the engine's pool.
        memories: of all ranks: a block that changes hands is poisoned there.
    """

    def __init__(
        self, setup: Setup, pool: BlockPool, memories: Sequence[RankMemory]
    ) -> None:
        self._setup = setup
        self._pool = pool
        self._memories = memories

    def local_hit(self, request: Request) -> list[int]:
        """Blocks of the engine's own prefix cache; the last token is not hit."""
        hit: list[int] = []
        if self._setup.prefix_caching:
            for number in range((len(request.tokens) - 1) // self._setup.block_size):
                block = self._pool.get(request.key(number))
                if block is None:
                    break
                hit.append(block)
        return hit

    def give(self, work: Work, local: Sequence[int]) -> bool:
        """A row for a waiting request: `local`, and what the work needs beyond.

        Returns:
            False, with nothing changed, if there is no room for it.
        """
        in_use = sum(self._pool.ref_count(block) > 0 for block in local)
        if self._missing(work) - in_use > self._pool.get_num_free_blocks():
            return False
        request = work.request
        self._pool.adopt(local)
        request.row = list(local)
        request.num_local = request.num_keyed = len(local)
        return self.grow(work)

    def grow(self, work: Work) -> bool:
        """The blocks that the work needs beyond the row. The prefix cache knows them
        as far as this step fills them with what is not a guess.

        Returns:
            False, with nothing changed, if there is no room for them.
        """
        missing = self._missing(work)
        if missing > self._pool.get_num_free_blocks():
            return False
        work.new_blocks = self._pool.get_new_blocks(missing)
        for memory in self._memories:
            memory.poison(work.new_blocks)
        request = work.request
        request.row += work.new_blocks
        if work.num_tokens:
            self.cache(request, min(len(work.histories), len(request.tokens)))
        return True

    def cache(self, request: Request, tokens: int) -> None:
        """Let the prefix cache know the full blocks of the first `tokens` tokens."""
        first, end = request.num_keyed, tokens // self._setup.block_size
        if not self._setup.prefix_caching or end <= first:
            return
        self._pool.insert(
            request.row[first:end],
            [request.key(number) for number in range(first, end)],
            parent=request.key(first - 1) if first else None,
            depth=first,
        )
        request.num_keyed = end

    def free(self, request: Request) -> None:
        """Take the row away."""
        self._pool.free_blocks(reversed(request.row))
        request.row = []
        request.num_keyed = request.num_local = request.num_computed = 0

    def _missing(self, work: Work) -> int:
        tokens = max(len(work.histories), work.request.num_computed)
        return max(0, -(-tokens // self._setup.block_size) - len(work.request.row))
