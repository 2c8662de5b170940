"""What is in a block, as far as a test can tell: the content model.

Real KV depends on every token up to its own; so does a `Slot`. Whoever reads a slot
says which one it must be, and a stale, torn, foreign or never written one is an
`AssertionError` on the spot, where a real engine would go on with wrong numbers.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from kvplugin.contract import CopyJob

BLOCK_BYTES: Final = 64
"""What a block is said to weigh on a rank."""


class Slot(NamedTuple):
    """The KV of one token: all that its bytes depend on."""

    rank: int
    position: int
    history: int
    """Of the tokens up to this one, from `histories_of`."""


POISON: Final = Slot(-1, -1, -1)
"""What a block holds between two owners."""


def histories_of(before: int, tokens: Iterable[int]) -> list[int]:
    """At each of the tokens: a number for it and all tokens before, `before` being
    that of what precedes the first."""
    histories = []
    for token in tokens:
        before = hash((before, token))
        histories.append(before)
    return histories


class RankMemory:
    """One rank's KV tensors and its share of host memory.

    Args:
        rank: makes the bytes of this rank differ from those of the others.
        num_blocks: blocks of the engine's pool.
        block_size: tokens of a block.
        host_blocks: blocks of host memory.
        in_use: whether a block of the engine has an owner.
        awaits_load: whether a block of the engine is to be filled by a load.
    """

    def __init__(
        self,
        rank: int,
        num_blocks: int,
        block_size: int,
        host_blocks: int,
        *,
        in_use: Callable[[int], bool],
        awaits_load: Callable[[int], bool],
    ) -> None:
        self.broken = False
        """Whether copies raise."""
        self.host = {host: [POISON] * block_size for host in range(host_blocks)}
        """What each host block holds."""
        self._rank = rank
        self._block_size = block_size
        self._blocks = [[POISON] * block_size for _ in range(num_blocks)]
        self._in_use = in_use
        self._awaits_load = awaits_load

    def poison(self, ids: Iterable[int]) -> None:
        """The blocks change hands: their old content is gone."""
        for block in ids:
            self._blocks[block] = [POISON] * self._block_size

    def write(self, row: Sequence[int], histories: Sequence[int], start: int) -> None:
        """Compute the KV of the tokens from position `start` on."""
        for position in range(start, len(histories)):
            block, place = divmod(position, self._block_size)
            slot = Slot(self._rank, position, histories[position])
            self._blocks[row[block]][place] = slot

    def read(self, row: Sequence[int], histories: Sequence[int]) -> None:
        """Attention of the last token over all of `histories`.

        Raises:
            AssertionError: a slot holds something else than it should.
        """
        for position, history in enumerate(histories):
            block, place = divmod(position, self._block_size)
            found = self._blocks[row[block]][place]
            wanted = Slot(self._rank, position, history)
            assert found == wanted, (
                f"block {row[block]} of {list(row)}: {wanted} expected, {found} found"
            )

    def execute(self, job: CopyJob) -> int:
        """A transport's work: moves blocks, as they are now.

        Raises:
            OSError: the memory is broken.
            AssertionError: a block is nobody's, or is not to be written.
        """
        if self.broken:
            raise OSError("no space left")
        moved = 0
        for _, engine_ids, host_ids in job.parts:
            for block, host in zip(engine_ids, host_ids, strict=True):
                assert self._in_use(block), f"job {job.id} uses free block {block}"
                if job.store:
                    self.host[host] = list(self._blocks[block])
                else:
                    assert self._awaits_load(block), f"block {block} awaits no load"
                    self._blocks[block] = list(self.host[host])
                moved += BLOCK_BYTES
        return moved
