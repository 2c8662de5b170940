"""Whose bytes are where: kvplugin's content model under the engine.

    content = ContentWatch()
    engine = ReferenceEngine(model, config, content=content)

Beside every layer's KV tensor of every rank stands a model of it, which remembers of
each slot the token (its position, and what its bytes depend on) that was written there.
Writes are seen at the slots that are really written and reads at the places that are
really read, so a stale, foreign, poisoned or never written row ends the step with a
`ContentError`, where the engine would go on with wrong numbers. Blocks that the pool
frees or hands out are poisoned in the models.

Seen: rows of attention layers, the sinks and an encoder's rows among them; states, and
their copies between blocks; zeroing; and transfers, where a connector's transport is
wrapped by `ContentWatch.transport` (`watched_offload` does that for offload). Not seen:
a transfer that nobody wrapped, so that what it loads counts as never written; and which
elements inside a row are read.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

from kvplugin.block_pool import BlockPool
from kvplugin.connectors.offload.config import OffloadConfig
from kvplugin.connectors.offload.scheduler import OffloadScheduler
from kvplugin.connectors.offload.worker import OffloadWorker
from kvplugin.contract import EngineInfo, Transport
from kvplugin.integration.reference.connector import Connector
from kvplugin.integration.reference.content_memory import (
    LayerContent,
    WatchedRows,
    WatchedStates,
    WatchedTokens,
    WatchedZeroer,
)
from kvplugin.integration.reference.content_transfers import WatchedTransport
from kvplugin.integration.reference.history import Spans
from kvplugin.integration.reference.layers import Memory, Mixer
from kvplugin.integration.reference.paged import PagedTokens, RowStore
from kvplugin.integration.reference.runner import Runner, TokenPlaces
from kvplugin.integration.reference.states import PagedStates
from kvplugin.kernels.region import Region
from kvplugin.request import RequestLike
from kvplugin.scheduler import SchedulerOutput
from kvplugin.testing.pool_watch import watch_pool
from kvplugin.testing.rules import group_models, identity_of_request
from kvplugin.testing.slots import STATE_SLOT, Slot
from kvplugin.worker.batch import StepBatch, WorkerRequest
from kvplugin.worker.zeroing import Zeroer

_LOOKAHEAD: Final = 64
"""Most tokens that a drafter may go beyond those that are known."""


class ContentWatch:
    """The content models of one engine; to be given to one engine only."""

    def __init__(self) -> None:
        self.memories: dict[int, dict[str, LayerContent]] = {}
        """Rank -> layer -> its content."""
        self._pool: BlockPool | None = None
        self._request_of: Callable[[str], RequestLike] | None = None

    def bind(self, pool: BlockPool, request_of: Callable[[str], RequestLike]) -> None:
        """Called by the engine before the pool is used for requests."""
        self._pool, self._request_of = pool, request_of

    def make_runner(self, *args: Any, **settings: Any) -> Runner:
        """A `Runner` whose memory is watched."""
        return WatchedRunner(self, *args, **settings)

    def transport(self, rank: int, transport: Transport) -> Transport:
        """Watch the transfers of a rank's worker half."""
        return WatchedTransport(transport, self.memories.setdefault(rank, {}))

    def histories(self, req_id: str, tokens: Sequence[int]) -> list[int]:
        """What the bytes of each of a request's tokens depend on, as one number."""
        if self._request_of is None:
            raise ValueError("this watch was given to no engine")
        identity = identity_of_request(self._request_of(req_id))
        return identity.histories(tokens)

    def add(self, rank: int, memory: LayerContent) -> None:
        """A layer's memory, empty; from now on the pool tells it what it does."""
        if self._pool is None:
            raise ValueError("this watch was given to no engine")
        watch_pool(self._pool, memory)
        self.memories.setdefault(rank, {})[memory.layer] = memory


class WatchedRunner(Runner):
    """A worker that keeps the content of its memory in step.

    Args:
        watch: of the engine.
        args: of `Runner`, and its settings.
    """

    def __init__(self, watch: ContentWatch, *args: Any, **settings: Any) -> None:
        self._watch = watch
        self._rank: int = args[2]
        self._memories = watch.memories.setdefault(self._rank, {})
        self._labels: list[list[int]] = []
        self._num_steps = 0
        super().__init__(*args, **settings)

    def begin(self, output: SchedulerOutput) -> StepBatch:
        """See `Runner.begin`; notes what each token of the step is."""
        step = super().begin(output)
        self._labels, self._num_steps = [], self._num_steps + 1
        for index, request in enumerate(step.requests):
            end = int(step.num_computed[index] + step.num_scheduled[index])
            drafts = output.scheduled_spec_decode_tokens.get(request.req_id, ())
            tokens = [*request.token_ids[: end - len(drafts)], *drafts]
            self._labels.append(self._watch.histories(request.req_id, tokens))
        return step

    def history(self, mixer: Mixer, spans: Spans) -> Any:
        """See `Runner.history`."""
        history = super().history(mixer, spans)
        if isinstance(history, PagedStates):
            memory = self._memories[mixer.name]
            plans = self._state_plans[memory.group.index]
            return WatchedStates(history, memory, plans, spans, self._labels)
        if isinstance(history, PagedTokens):
            return self._watched(history, mixer, *self._of_step(mixer, spans))
        return history

    def history_at(self, mixer: Mixer, places: TokenPlaces) -> Any:
        """See `Runner.history_at`."""
        tokens = [self._drafted(mixer, request) for request in self.batch.requests]
        new = [
            tokens[row][at] if row >= 0 else None
            for row, at in zip(
                places.rows.tolist(), places.positions.tolist(), strict=True
            )
        ]
        seen = [tokens[row] for row in places.requests.tolist()]
        history = super().history_at(mixer, places)
        return self._watched(history, mixer, new, seen, [0] * len(seen))

    def _of_step(
        self, mixer: Mixer, spans: Spans
    ) -> tuple[list[Slot], list[list[Slot]], list[int]]:
        """What a layer writes in a step, what it may read of each request, and the
        first token of it that it sees."""
        group = self._memories[self.tensors.layers[mixer.name].layer].group
        labels: Sequence[Sequence[int]] = self._labels
        if mixer.memory is Memory.ENCODER:
            labels = [
                range(len(s.encoder) if s.encoder is not None else 0) for s in spans
            ]
        seen = [
            [
                Slot(group.index, at, label, request.req_id)
                for at, label in enumerate(mine)
            ]
            for request, mine in zip(self.batch.requests, labels, strict=False)
        ]
        if mixer.memory is Memory.ENCODER:
            new = [
                slot
                for span, slots in zip(spans, seen, strict=True)
                if not span.num_computed
                for slot in slots
            ]
            return new, seen, [0] * len(spans)
        starts = [span.num_computed for span in spans]
        new = [
            slot
            for start, slots in zip(starts, seen, strict=True)
            for slot in slots[start:]
        ]
        return new, seen, [group.first_read(start) for start in starts]

    def _drafted(self, mixer: Mixer, request: WorkerRequest) -> list[Slot]:
        """A drafter's rows, each of which depends on the token behind it too. Where
        that is not known, they are those of this step and of no other."""
        group, tokens = self.tensors.layers[mixer.name].group, request.token_ids
        labels = self._watch.histories(request.req_id, tokens)[1:]
        scratch = range(len(labels), len(tokens) + _LOOKAHEAD)
        labels += [hash((self._num_steps, at, *tokens)) for at in scratch]
        return [Slot(group, at, n, request.req_id) for at, n in enumerate(labels)]

    def _watched(self, history: PagedTokens, mixer: Mixer, *wanted: Any) -> Any:
        store = self._stores[mixer.name]
        if not isinstance(store, WatchedRows):
            raise TypeError(f"the rows of layer {mixer.name} are not watched")
        return WatchedTokens(history, store, *wanted)

    def _make_stores(self) -> dict[str, RowStore]:
        stores, groups = super()._make_stores(), group_models(self.config)
        for cache in self.tensors.layers.values():
            if cache.layer not in self._memories:
                memory = LayerContent(
                    cache.layer, cache.group, groups, self.config.num_blocks
                )
                self._watch.add(self._rank, memory)
        caches = self.tensors.layers
        return {
            name: WatchedRows(
                store,
                self._memories[caches[name].layer],
                self.tables.tables[caches[name].group].shape,
            )
            for name, store in stores.items()
        }

    def _make_zeroer(self, regions: Sequence[Region]) -> Zeroer:
        return WatchedZeroer(super()._make_zeroer(regions), self._memories)

    def _copy_states(self, group: int, source: int, target: int) -> None:
        super()._copy_states(group, source, target)
        for memory in self._memories.values():
            if memory.group.index == group:
                memory.put(target, STATE_SLOT, memory.content(source, STATE_SLOT))


def watched_offload(config: OffloadConfig, watch: ContentWatch) -> Connector:
    """Offload to host memory, every copy of which is seen."""

    class Worker(OffloadWorker):
        def __init__(self, info: EngineInfo) -> None:
            super().__init__(
                info,
                config,
                lambda pools: watch.transport(info.rank, self.own_transport(pools)),
            )

    return Connector(lambda info: OffloadScheduler(info, config), Worker)
