"""The protocol between a connector and the policy that says what it stores.

A tier (host memory) is written each time a block is computed, and most blocks are never
read again. The policy is asked once for each store of a request and group of layers,
about all blocks of it, and answers with a mask.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvplugin.policies.eviction import NO_CONTEXT, BlockContext


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadContext:
    """Whose blocks these are, and where they would go."""

    request_id: str
    group: int = 0
    """Number of the KV cache group."""
    depth: int = 0
    """Index of the first key in the request, in units of `block_tokens`."""
    block_tokens: int
    """Tokens that one key stands for: an engine's block, or a chunk of several."""
    prefix_tokens: int
    """Tokens of the longest prefix that may be stored of the request by and by, as far
    as is known."""
    context: BlockContext = NO_CONTEXT
    """What the request's hints say."""
    medium: str = "CPU"
    """The tier, as in KV events."""


class OffloadPolicy(Protocol):
    """Says what is worth a copy. It changes no output: what is not stored is computed
    again.

    A prefix is hit from its start, so for groups whose blocks form one (full
    attention) the mask counts up to its first False: a block behind a hole could never
    be loaded, in any group. Of windows and states each block counts for itself.
    """

    def admit(self, keys: Sequence[bytes], ctx: OffloadContext) -> Sequence[bool]:
        """Which blocks to store, one answer a key; O(1) a key.

        Asked about blocks that the tier does not have, in request order. Those that
        are refused may be asked about again, by the same request too (after a
        preemption). What comes after a refusal is asked about as well, so that the
        policy has seen it.
        """
