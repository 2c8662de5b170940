"""One rank's worker: block tables, KV tensors, and the histories of a step's layers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kvplugin.errors import IntegrityError
from kvplugin.integration.reference.history import History, Spans
from kvplugin.integration.reference.layers import Memory, Mixer
from kvplugin.integration.reference.memory import MemoryPlan
from kvplugin.integration.reference.model import RankModel
from kvplugin.integration.reference.paged import PagedTokens, RowStore, row_store
from kvplugin.integration.reference.states import (
    PagedStates,
    StatePlan,
    StateRows,
    copy_states,
)
from kvplugin.kernels import dispatch
from kvplugin.kernels.region import Region
from kvplugin.scheduler import SchedulerOutput
from kvplugin.spec import MambaSpec
from kvplugin.worker.batch import StepBatch, WorkerBatch
from kvplugin.worker.block_table import BlockTables
from kvplugin.worker.metadata import GroupMetadata, MetadataBuilder, StepMetadata
from kvplugin.worker.table_shape import table_shape
from kvplugin.worker.tensors import allocate_kv_cache
from kvplugin.worker.zeroing import BlockZeroing, Zeroer


@dataclass(frozen=True, slots=True, eq=False)
class TokenPlaces:
    """Where tokens lie that are not those of the step."""

    rows: torch.Tensor
    """Row of each token's request, `NO_ROW` for tokens that leave nothing: int32
    [tokens]."""
    positions: torch.Tensor
    """int64 [tokens]."""
    requests: torch.Tensor
    """Rows of the requests, int64 [requests]."""
    ends: Sequence[int]
    """Tokens of each that may be read."""


class Runner:
    """The worker of one rank.

    Args:
        model: the rank's part of the model.
        plan: of the KV cache.
        rank: which of the plan's workers it is.
        max_num_seqs: requests at a time.
        sink_blocks: group -> blocks that all its requests share.
        extra: layers of a drafter, which the plan knows too.
        device: where KV lies.
    """

    def __init__(
        self,
        model: RankModel,
        plan: MemoryPlan,
        rank: int,
        *,
        max_num_seqs: int,
        sink_blocks: Mapping[int, Sequence[int]],
        extra: Sequence[Mixer] = (),
        device: str = "cpu",
    ) -> None:
        self.model = model
        self.config = plan.workers[rank]
        self._mixers = [*model.mixers, *extra]
        groups, limits = self.config.kv_cache_groups, plan.limits
        self.tables = BlockTables(
            [
                table_shape(group.kv_cache_spec, limits, size)
                for group, size in zip(groups, plan.kernel_block_sizes, strict=True)
            ],
            max_num_reqs=max_num_seqs,
            max_model_len=limits.max_model_len,
            device=device,
        )
        self.batch = WorkerBatch(self.tables)
        self.metadata = MetadataBuilder(
            groups, self.tables, limits.max_num_batched_tokens
        )
        self.tensors = allocate_kv_cache(
            self.config,
            plan.backends,
            plan.layout,
            kernel_block_sizes=plan.kernel_block_sizes,
            device=device,
        )
        self._zeroing = BlockZeroing(self.tensors, self._make_zeroer)
        self._states = {
            index: StateRows(group.kv_cache_spec)
            for index, group in enumerate(groups)
            if isinstance(group.kv_cache_spec, MambaSpec)
        }
        self._state_plans: dict[int, list[StatePlan]] = {}
        self._stores = self._make_stores()
        self._sinks = self._write_sinks(sink_blocks)
        self.step: StepMetadata | None = None
        """Of the step that is being computed."""

    def _make_zeroer(self, regions: Sequence[Region]) -> Zeroer:
        return dispatch.block_zeroer(regions, device=self.tables.device)

    def _make_stores(self) -> dict[str, RowStore]:
        config = self.model.config
        return {
            mixer.name: row_store(
                mixer.memory,
                self.tensors.layers[mixer.name],
                config.torch_dtype,
                config.kv_lora_rank,
            )
            for mixer in self._mixers
            if mixer.memory not in (Memory.STATES, Memory.NOTHING)
        }

    def _write_sinks(
        self, sink_blocks: Mapping[int, Sequence[int]]
    ) -> dict[str, torch.Tensor]:
        """Write each sink layer's rows, once for all requests; the kernel blocks."""
        written = {}
        for group, blocks in sink_blocks.items():
            shape = self.tables.tables[group].shape
            size, ratio = shape.kernel_block_size, shape.ratio
            parts = torch.arange(ratio)
            kernel_blocks = (torch.tensor(blocks)[:, None] * ratio + parts).flatten()
            kernel_blocks = kernel_blocks.to(self.tables.device)
            offsets = torch.arange(size, device=self.tables.device)
            slots = (kernel_blocks[:, None] * size + offsets).flatten()
            for mixer in self._mixers:
                place = self.tensors.layers.get(mixer.name)
                if place is None or place.group != group:
                    continue
                if mixer.sink_rows():
                    self._stores[mixer.name].write(mixer.sink_rows(), slots)
                written[mixer.name] = kernel_blocks
        return written

    # -- a step --------------------------------------------------------------------

    def zero(self, output: SchedulerOutput) -> None:
        """Zero the step's new blocks, where it matters what they held before: states
        begin from zeros. Before loads begin, for they fill some of these blocks."""
        self._zeroing.zero(output.new_block_ids_to_zero)

    def begin(self, output: SchedulerOutput) -> StepBatch:
        """Take over a step: who computes what, and in which blocks."""
        step = self.batch.apply(output)
        for states in self._states.values():
            for req_id in output.finished_req_ids | output.preempted_req_ids:
                states.forget(req_id)
            for new in output.scheduled_new_reqs:
                states.admit(new.req_id, new.num_computed_tokens)
            for cached in output.scheduled_cached_reqs:
                if cached.resumed:
                    states.admit(cached.req_id, cached.num_computed_tokens)
        self.step = self.metadata.build(step)
        self._state_plans = {
            group: self._plan_states(group, step) for group in self._states
        }
        return step

    def _plan_states(self, group: int, step: StepBatch) -> list[StatePlan]:
        table, plans = self.tables.tables[group], []
        counts = zip(
            step.requests,
            step.num_computed.tolist(),
            step.num_scheduled.tolist(),
            step.num_drafts.tolist(),
            strict=True,
        )
        for row, (request, start, new, drafts) in enumerate(counts):
            end = start + new
            plans.append(
                self._states[group].plan(
                    request.req_id, table.row(row), start, end - drafts, end
                )
            )
        return plans

    def history(self, mixer: Mixer, spans: Spans) -> History | None:
        """Where a layer keeps what it has seen, in this step; None for nowhere.

        Raises:
            IntegrityError: no step has begun.
        """
        if mixer.memory is Memory.NOTHING:
            return None
        if self.step is None:
            raise IntegrityError("no step has begun")
        cache = self.tensors.layers[mixer.name]
        if mixer.memory is Memory.STATES:
            return PagedStates(cache.tensors, self._state_plans[cache.group])
        group = self.step.groups[cache.group]
        slots, ends = group.slots, [span.end for span in spans]
        if mixer.memory is Memory.ENCODER:
            slots, ends = _encoder_places(group, spans)
        return self._tokens(mixer, group.block_table, slots, ends)

    def history_at(self, mixer: Mixer, places: TokenPlaces) -> PagedTokens:
        """The same for tokens at other places, in the blocks of this step's requests.

        Raises:
            IntegrityError: no step has begun.
        """
        if self.step is None:
            raise IntegrityError("no step has begun")
        group = self.tensors.layers[mixer.name].group
        slots = places.positions.new_empty(1, len(places.positions))
        dispatch.slot_mappings(
            self.tables.slot_tables([group]), places.rows, places.positions, slots
        )
        table = self.step.groups[group].block_table[places.requests]
        return self._tokens(mixer, table, slots[0], places.ends)

    def _tokens(
        self,
        mixer: Mixer,
        table: torch.Tensor,
        slots: torch.Tensor,
        ends: Sequence[int],
    ) -> PagedTokens:
        shape = self.tables.tables[self.tensors.layers[mixer.name].group].shape
        return PagedTokens(
            self._stores[mixer.name],
            table,
            slots,
            ends,
            block_size=shape.kernel_block_size,
            num_null=shape.ratio,
            sink=self._sinks.get(mixer.name),
        )

    def settle(self, step: StepBatch, sampled: Sequence[Sequence[int]]) -> None:
        """The step has brought these tokens, accepted drafts first."""
        for request, tokens in zip(step.requests, sampled, strict=True):
            request.token_ids += tokens
            for group, states in self._states.items():
                accepted = max(len(tokens) - 1, 0)
                for source, target in states.settle(request.req_id, accepted):
                    self._copy_states(group, source, target)

    def _copy_states(self, group: int, source: int, target: int) -> None:
        for cache in self.tensors.layers.values():
            if cache.group == group:
                copy_states(cache.tensors, source, target)


def _encoder_places(
    group: GroupMetadata, spans: Spans
) -> tuple[torch.Tensor, list[int]]:
    """Slots of the encoder's tokens of requests that begin, and the tokens of all."""
    lengths = [0 if span.encoder is None else len(span.encoder) for span in spans]
    slots = [torch.zeros(0, dtype=torch.int64, device=group.block_table.device)]
    size = group.block_size
    for index, (span, length) in enumerate(zip(spans, lengths, strict=True)):
        if not span.num_computed:
            tokens = torch.arange(length, device=group.block_table.device)
            blocks = group.block_table[index, tokens // size].long()
            slots.append(blocks * size + tokens % size)
    return torch.cat(slots), lengths
