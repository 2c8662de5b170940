"""KV that another engine has computed: real bytes for loads that a test times.

The scheduler half is `kvplugin.testing.RemoteKV`, which offers what a test says; the
bytes are those of a donor, an engine of the same weights that has computed the prompt,
in whatever layout and on however many ranks it keeps them.
"""

from collections.abc import Callable, Sequence
from typing import Any

from kvplugin.contract import CopyJob, EngineInfo
from kvplugin.integration.reference import Model, ReferenceEngine, SamplingParams
from kvplugin.integration.reference.config import EngineConfig
from kvplugin.integration.reference.connector import Connector
from kvplugin.kernels.host_convert import BlockConverter
from kvplugin.layout import HeadSlice, head_slices, plan_conversion
from kvplugin.spec import KVCacheConfig
from kvplugin.testing import COMPLETES, Fate, FaultyTransport, RemoteKV, RemoteWorker
from kvplugin.testing.rules import group_models
from kvplugin.worker.describe import describe_cache, kv_layout
from kvplugin.worker.tensors import LayerCache


class Groups:
    """What a `RemoteWorker` wants to know of memory."""

    def __init__(self, config: KVCacheConfig) -> None:
        self.groups = group_models(config)


class Donor:
    """An engine that has computed prompts, and still holds their blocks.

    Args:
        model: of donor and engine.
        config: of the donor.
    """

    def __init__(self, model: Model, config: EngineConfig) -> None:
        self.remote = RemoteKV()
        self.transports: list[FaultyTransport] = []
        """One a rank of the engine."""
        self.workers: list[RemoteWorker] = []
        self.fate: Callable[[CopyJob], Fate] = lambda job: COMPLETES
        self._engine = ReferenceEngine(model, config)
        self._model = model
        self._rows: dict[str, tuple[list[int], ...]] = {}

    def serve(self, config: EngineConfig) -> ReferenceEngine:
        """The engine that gets the donor's bytes."""
        connector = Connector(lambda info: self.remote, self.worker)
        self.engine = ReferenceEngine(self._model, config, connector)
        return self.engine

    def offer(self, prompt: Sequence[int], tokens: int, params: SamplingParams) -> str:
        """A request of the engine for which so many tokens are on offer; its id."""
        req_id = self._engine.add_request(prompt, SamplingParams(max_tokens=2))
        while not self._engine.answers[req_id].token_ids:
            self._engine.step()
        rows = self._engine.manager.get_block_ids(req_id)
        mine = self.engine.add_request(prompt, params)
        self._rows[mine] = tuple(map(list, rows))
        self.remote.offers[mine] = tokens
        return mine

    def worker(self, info: EngineInfo) -> RemoteWorker:
        """The worker half of one rank of the engine."""
        transport = FaultyTransport(
            lambda job: self._move(job, info.rank, info.world_size),
            lambda job: self.fate(job),
        )
        self.transports.append(transport)
        groups: Any = Groups(self._engine.plan.scheduler)
        worker = RemoteWorker(self.remote, groups, transport)
        self.workers.append(worker)
        return worker

    def _move(self, job: CopyJob, rank: int, ranks: int) -> int:
        runner = self.engine.ranks.runners[rank]
        rows, moved = self._rows[self.remote.loads[job.id].request_id], 0
        for group, blocks, entries in job.parts:
            sources = [rows[group][entry] for entry in entries]
            for name in runner.config.kv_cache_groups[group].own_layer_names:
                target = runner.tensors.layers[name]
                moved += self._move_layer(target, sources, blocks, rank, ranks)
        return moved

    def _move_layer(
        self,
        target: LayerCache,
        sources: Sequence[int],
        blocks: Sequence[int],
        rank: int,
        ranks: int,
    ) -> int:
        donors = self._engine.ranks.runners
        if target.plan is None:  # states; of engines with as many ranks
            source = donors[rank].tensors.layers[target.layer]
            for mine, theirs in zip(target.tensors, source.tensors, strict=True):
                mine[list(blocks)] = theirs[list(sources)]
            return len(blocks)
        moved = 0
        total = self._model.config.num_kv_heads
        for peer, heads in head_slices(total, len(donors), ranks, rank):
            source = donors[peer].tensors.layers[target.layer]
            moved += _convert(source, target, heads, sources, blocks)
        return moved


def _convert(
    source: LayerCache,
    target: LayerCache,
    heads: HeadSlice,
    sources: Sequence[int],
    blocks: Sequence[int],
) -> int:
    conversion = plan_conversion(kv_layout(source), kv_layout(target), heads)
    converter = BlockConverter(
        conversion, describe_cache(source).address, describe_cache(target).address
    )
    return converter.convert(*conversion.pair_chunks(sources, blocks))
