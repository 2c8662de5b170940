"""After which tokens the state layers of a request keep a checkpoint.

A checkpoint is a block. Later requests hit only where there is one: a conversation
where its prompt ended, a common document where its own end was kept.
"""

from collections.abc import Collection

import msgspec

from kvplugin.errors import check_ranges
from kvplugin.hooks import CheckpointContext, hookimpl


class EndsOptions(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """Options of `Ends`."""

    chunk_tokens: int = 8192
    """Tokens between two checkpoints inside a prompt; the scheduler's
    `max_num_batched_tokens` to keep one where a step ends."""

    def __post_init__(self) -> None:
        check_ranges(self, {"chunk_tokens": (1, 2**31)})


class Ends:
    """Where the prompt ends, where its chunks do, and nothing of the output."""

    def __init__(self, options: EndsOptions) -> None:
        self._chunk = options.chunk_tokens

    @hookimpl
    def kvp_choose_checkpoints(self, ctx: CheckpointContext) -> Collection[int]:
        """The boundaries."""
        size, prompt = ctx.block_size, ctx.request.num_prompt_tokens
        chunks = range(self._chunk, prompt + 1, self._chunk)
        return _possible(ctx, {*_ends(ctx), *(end // size * size for end in chunks)})


class SpacedOptions(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """Options of `Spaced`."""

    every: int = 4
    """Blocks from one checkpoint to the next."""

    def __post_init__(self) -> None:
        check_ranges(self, {"every": (1, 2**31)})


class Spaced:
    """Every so many blocks, and where the prompt ends."""

    def __init__(self, options: SpacedOptions) -> None:
        self._every = options.every

    @hookimpl
    def kvp_choose_checkpoints(self, ctx: CheckpointContext) -> Collection[int]:
        """The boundaries."""
        spaced = ctx.boundaries[self._every - 1 :: self._every]
        return _possible(ctx, {*spaced, *_ends(ctx)})


def _ends(ctx: CheckpointContext) -> set[int]:
    """The last boundary of the prompt, for who goes on from it, and the last one that
    the same prompt can hit, whose last token is computed in any case."""
    size, prompt = ctx.block_size, ctx.request.num_prompt_tokens
    return {prompt // size * size, (prompt - 1) // size * size}


def _possible(ctx: CheckpointContext, wanted: set[int]) -> list[int]:
    return sorted(boundary for boundary in wanted if boundary in ctx.boundaries)
