"""A trace's requests as the core takes them: hashed in blocks of the wanted size."""

from collections.abc import Sequence
from typing import Any, Final

from kvplugin.errors import ConfigError
from kvplugin.policies.eviction import BlockContext
from kvplugin.replay.settings import Partial
from kvplugin.replay.trace import Trace, TraceEntry
from kvplugin.spec import cdiv

_NODE_BYTES: Final = 8
_PART_BYTES: Final = 4


class TraceRequest:
    """A `RequestLike` whose block hashes are given and whose tokens nobody has.

    It has one token more than its blocks hold, the one to compute next, so that all of
    its blocks may hit.
    """

    __slots__ = (
        "arrival_time",
        "block_context",
        "block_hashes",
        "lookup_blocks",
        "lookup_tokens",
        "num_computed_tokens",
        "num_prompt_tokens",
        "num_tokens",
        "prompt_tokens",
        "request_id",
    )

    cache_salt = None
    lora_request = None
    mm_features = ()
    num_preemptions = 0
    priority = 0
    prompt_embeds: Any = None
    skip_reading_prefix_cache = False

    def __init__(
        self,
        request_id: str,
        block_hashes: list[bytes],
        *,
        block_size: int,
        lookup_blocks: int,
        entry: TraceEntry,
    ) -> None:
        """A request of blocks.

        Args:
            request_id: a name that no other request has.
            block_hashes: one a block, of the prompt and then of the answer.
            block_size: tokens of a block.
            lookup_blocks: how many of them the prompt may find in a cache.
            entry: what the trace says of it.
        """
        self.request_id = request_id
        self.block_hashes = block_hashes
        self.lookup_blocks = lookup_blocks
        self.lookup_tokens = lookup_blocks * block_size
        self.num_tokens = len(block_hashes) * block_size + 1
        self.num_prompt_tokens = self.lookup_tokens + 1
        self.num_computed_tokens = 0
        self.prompt_tokens = entry.input_length
        self.arrival_time = entry.timestamp
        ttl_s = entry.ttl_s
        self.block_context = BlockContext(
            priority=entry.priority,
            expires_at=None if ttl_s is None else entry.timestamp + ttl_s,
            session=entry.session,
            turn=entry.turn,
            ends_session=entry.ends_session,
        )

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Zeros: a trace has no text."""
        return [0] * self.num_tokens

    def tokens_of(self, blocks: int, block_size: int) -> int:
        """Prompt tokens in the first `blocks` of its blocks."""
        return min(blocks * block_size, self.prompt_tokens)


class _Hashes:
    """Equal chains of ids -> equal hashes, without the chance of a collision: each
    (hash of the prefix, id) is numbered."""

    def __init__(self, parts: int) -> None:
        self._suffixes = [
            part.to_bytes(_PART_BYTES, "big") if parts > 1 else b""
            for part in range(parts)
        ]
        self._nodes: dict[tuple[bytes, int | str], bytes] = {}

    def of(self, ids: Sequence[int | str]) -> list[bytes]:
        """`parts` hashes an id."""
        nodes, node = self._nodes, b""
        chain = []
        for block_id in ids:
            known = nodes.get((node, block_id))
            if known is None:
                known = len(nodes).to_bytes(_NODE_BYTES, "big")
                nodes[node, block_id] = known
            node = known
            chain.append(node)
        if len(self._suffixes) == 1:
            return chain
        return [node + suffix for node in chain for suffix in self._suffixes]


def make_requests(
    trace: Trace, block_size: int, partial: Partial
) -> tuple[TraceRequest, ...]:
    """The requests of a trace, in its order, to be replayed as often as wanted.

    Args:
        trace: what was read.
        block_size: tokens of a block hash, a divisor of the trace's.
        partial: whether the partial block at the end of a prompt is a block.

    Raises:
        ConfigError: ids cannot be split into such blocks.
    """
    if trace.block_size % block_size:
        raise ConfigError(
            f"block_size={block_size} must divide the {trace.block_size} tokens that "
            f"an id of the trace covers"
        )
    hashes = _Hashes(trace.block_size // block_size)
    requests = []
    for number, entry in enumerate(trace.entries):
        found = hashes.of(entry.ids)
        if trace.full_blocks_only:
            lookup = min(entry.input_length // block_size, len(found))
        else:
            lookup = _prompt_blocks(entry.input_length, block_size, partial)
            lookup = min(lookup, len(found))
            del found[lookup:]
        requests.append(
            TraceRequest(
                str(number),
                found,
                block_size=block_size,
                lookup_blocks=lookup,
                entry=entry,
            )
        )
    return tuple(requests)


def _prompt_blocks(tokens: int, block_size: int, partial: Partial) -> int:
    return cdiv(tokens, block_size) if partial == "count" else tokens // block_size
