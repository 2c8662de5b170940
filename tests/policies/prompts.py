"""A pool that serves prompts of one letter a block, for small exact tests."""

from collections.abc import Iterable

from kvplugin.block_pool import BlockPool
from kvplugin.policies.eviction import NO_CONTEXT, BlockContext, EvictionPolicy
from kvplugin.testing import watch_policy
from tests.core.pool_helpers import key


class Prompts:
    """Two prompts share their common prefix only: the key of a block is the prompt up
    to it.

    Args:
        num_blocks: usable blocks, without the null block.
        policy: the policy under test, unbound.
        strict: a policy that the pool would replace is an error.
    """

    def __init__(
        self, num_blocks: int, policy: EvictionPolicy, *, strict: bool = True
    ) -> None:
        self.policy = policy
        self.pool = BlockPool(num_blocks + 1, policy=policy)
        if strict:
            watch_policy(self.pool)
        self._names: dict[bytes, str] = {}

    def begin(self, prompt: str, ctx: BlockContext = NO_CONTEXT) -> list[int]:
        """Adopt the longest prefix that is there and compute the rest.

        Returns:
            The request's blocks.
        """
        keys = self.keys(prompt)
        row: list[int] = []
        for a_key in keys:
            if (block := self.pool.get(a_key)) is None:
                break
            row.append(block)
        hits = len(row)
        self.pool.adopt(row, ctx)
        row += self.pool.get_new_blocks(len(prompt) - hits)
        self.pool.insert(
            row[hits:],
            keys[hits:],
            parent=keys[hits - 1] if hits else None,
            depth=hits,
            ctx=ctx,
        )
        return row

    def end(self, row: Iterable[int]) -> None:
        """The request gives its blocks back, tail first."""
        self.pool.free_blocks([*row][::-1])
        self.pool.check()

    def serve(self, *prompts: str, ctx: BlockContext = NO_CONTEXT) -> None:
        """One request after the other."""
        for prompt in prompts:
            self.end(self.begin(prompt, ctx))

    def keys(self, prompt: str) -> list[bytes]:
        """Keys of a prompt's blocks."""
        prefixes = [prompt[: i + 1] for i in range(len(prompt))]
        self._names.update({key(prefix): prefix for prefix in prefixes})
        return [key(prefix) for prefix in prefixes]

    def has(self, prefix: str) -> bool:
        """Whether the block of a prefix is there."""
        return self.pool.get(key(prefix)) is not None

    def order(self) -> list[str]:
        """Prefixes whose blocks are evictable, next victim first."""
        return [self._names[self.pool.key_of(b) or b""] for b in self.policy.order()]

    def lose(self, n: int) -> list[str]:
        """Evict `n` blocks and keep them.

        Returns:
            The prefixes that are gone.
        """
        gone = self.order()[:n]
        unkeyed = self.pool.get_num_free_blocks() - len(self.policy)
        self.pool.get_new_blocks(unkeyed + n)
        assert not any(self.has(name) for name in gone)
        self.pool.check()
        return gone
