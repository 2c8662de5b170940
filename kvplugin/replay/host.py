"""A host tier behind the device: a second pool under the same hashes."""

from itertools import groupby, islice, takewhile

from kvplugin.block_pool import BlockPool
from kvplugin.events import MEDIUM_CPU
from kvplugin.hooks import BlockPoolContext, Hooks
from kvplugin.replay.policies import make_policy
from kvplugin.replay.requests import TraceRequest


class HostTier:
    """What requests computed is stored here after they ran; lookups go on here where
    the device's hit ends.

    Args:
        capacity: usable blocks.
        policy: name of its eviction policy.
        block_size: tokens of a block.
        hooks: the plugins that make pool and policy.

    Raises:
        ConfigError: there is no such policy.
        PluginError: a plugin fails.
    """

    def __init__(
        self, capacity: int, policy: str, block_size: int, hooks: Hooks
    ) -> None:
        self.policy = policy
        self.pool: BlockPool = hooks.make_block_pool(
            BlockPoolContext(
                num_blocks=capacity + 1,  # the null block
                policy=make_policy(hooks, policy, {}, capacity, MEDIUM_CPU),
                block_size=block_size,
                enable_caching=True,
                medium=MEDIUM_CPU,
            )
        )
        self._blocks = self.pool.cached_blocks(0)

    def load(self, request: TraceRequest, start: int) -> list[int]:
        """Take the blocks that continue a device hit of `start` blocks, in use now."""
        wanted = islice(request.block_hashes, start, request.lookup_blocks)
        found = map(self._blocks.get, wanted)
        loaded = [block for block in takewhile(bool, found) if block]
        if loaded:
            self.pool.adopt(loaded, request.block_context)
        return loaded

    def store(self, request: TraceRequest, start: int, loaded: list[int]) -> None:
        """Store what the request computed behind its first `start` blocks, as far as
        there is room, and give back what it loaded."""
        hashes = request.block_hashes
        missing = [
            i for i in range(start, len(hashes)) if hashes[i] not in self._blocks
        ]
        missing = missing[: self.pool.get_num_free_blocks()]
        blocks = self.pool.get_new_blocks(len(missing))
        places = zip(missing, blocks, strict=True)
        for _, run in groupby(enumerate(places), lambda item: item[1][0] - item[0]):
            placed = [place for _, place in run]
            first = placed[0][0]
            self.pool.cache_run(
                [block for _, block in placed],
                hashes[first : first + len(placed)],
                hashes[first - 1] if first else None,
                first,
                0,
                request.block_context,
            )
        self.pool.free_blocks((loaded + blocks)[::-1])

    def give_back(self, loaded: list[int]) -> None:
        """The request did not run."""
        self.pool.free_blocks(loaded[::-1])
