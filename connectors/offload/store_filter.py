"""The offload policy as the scheduler half uses it: asked once a store and group."""

import logging
from collections.abc import Sequence

from kvplugin.connectors.offload.chunks import Chunk, Chunking
from kvplugin.contract import RequestView
from kvplugin.errors import PluginError
from kvplugin.events import MEDIUM_CPU
from kvplugin.policies.eviction import context_of
from kvplugin.policies.offload import AdmitAll, OffloadContext, OffloadPolicy

logger = logging.getLogger("vllm.kvplugin.offload")


class StoreFilter:
    """Which chunks are worth a copy. A policy that fails is replaced by one that wants
    all of them, and the engine lives.

    Args:
        policy: to be asked.
        prompt_only: chunks of prompts are stored, those of outputs are not.
    """

    def __init__(self, policy: OffloadPolicy, *, prompt_only: bool) -> None:
        self.failures = 0
        """How often a policy was replaced."""
        self._policy = policy
        self._prompt_only = prompt_only

    def mask(
        self, request: RequestView, cut: Chunking, chunks: Sequence[Chunk]
    ) -> list[bool]:
        """Which chunks to store.

        Args:
            request: whose chunks they are.
            cut: their group.
            chunks: those that host memory does not have, one or more, in order.
        """
        keys = [chunk.key for chunk in chunks]
        return self._ask(keys, self._context(request, cut, chunks[0].number))

    def _context(
        self, request: RequestView, cut: Chunking, depth: int
    ) -> OffloadContext:
        size = cut.tokens
        most = request.num_prompt_tokens if self._prompt_only else request.num_tokens
        return OffloadContext(
            request_id=request.request_id,
            group=cut.index,
            depth=depth,
            block_tokens=size,
            prefix_tokens=most // size * size,
            context=context_of(request),
            medium=MEDIUM_CPU,
        )

    def _ask(self, keys: Sequence[bytes], ctx: OffloadContext) -> list[bool]:
        try:
            mask = list(self._policy.admit(list(keys), ctx))
            _verify(mask, len(keys))
        except Exception:
            logger.exception(
                "offload policy %s failed: everything is stored from now on",
                type(self._policy).__name__,
            )
            self.failures += 1
            self._policy = AdmitAll()
            mask = [True] * len(keys)
        return mask


def _verify(mask: Sequence[object], n: int) -> None:
    if len(mask) != n:
        raise PluginError(f"a mask of {n} keys wanted, got one of {len(mask)}")
    for wanted in mask:
        if not isinstance(wanted, bool):
            kind = type(wanted)
            raise PluginError(
                f"True or False wanted, got {wanted!r}, a "
                f"{kind.__module__}.{kind.__qualname__}: convert it with bool()"
            )
