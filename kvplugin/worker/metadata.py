"""What attention backends are told of a step.

What all groups have in common (where queries start, how long sequences are) is made
once a step, what belongs to a group (blocks, slots) once a group; the group's layers,
those that use another's KV included, get the same object.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvplugin.errors import CapacityError, ConfigError
from kvplugin.kernels.dispatch import slot_mappings
from kvplugin.spec import KVCacheGroupSpec
from kvplugin.worker.batch import StepBatch
from kvplugin.worker.block_table import BlockTables
from kvplugin.worker.buffers import MirroredTensor
from kvplugin.worker.step_tokens import StepTokens, step_tokens
from kvplugin.worker.tensors import KVTensors


@dataclass(frozen=True, slots=True, eq=False)
class BatchMetadata:
    """What holds for every group. Tensors are on the device; behind the requests and
    tokens that exist, padding has no queries, no sequence and row -1."""

    num_reqs: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor
    """Where each request's tokens start, and their end: int32 [padded requests + 1]."""
    seq_lens: torch.Tensor
    """Tokens of each request after the step: int32 [padded requests]."""
    local_lens: torch.Tensor
    """Those that this context-parallel rank keeps in groups that are shared out: int32
    [padded requests]; `seq_lens` itself without context parallelism."""
    num_computed: torch.Tensor
    """Tokens of each request before it: int32 [padded requests]."""
    rows: torch.Tensor
    """Request of each token: int32 [padded tokens]."""
    positions: torch.Tensor
    """Of each token in its request: int64 [padded tokens]."""
    logits_indices: torch.Tensor
    """Tokens whose logits are wanted: of each request the last, and where drafts are
    verified as many before it. int32 [requests + drafts]."""
    query_lens: tuple[int, ...]
    """Tokens of each request, on the host."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupMetadata:
    """What one group's layers are told."""

    batch: BatchMetadata
    group: int
    block_size: int
    """Tokens of a block of `block_table`."""
    block_table: torch.Tensor
    """Kernel blocks: int32 [padded requests, columns]."""
    slots: torch.Tensor
    """Where each token's KV is written, -1 for nowhere: int64 [padded tokens]."""
    kv_lens: torch.Tensor
    """Tokens of each request that the group keeps on this rank: `local_lens` of the
    batch where it is shared out, else `seq_lens`."""
    common_prefix_len: int
    """Leading tokens whose blocks all requests share and that all have computed:
    whole blocks of the manager; 0 for none."""


@dataclass(frozen=True, slots=True, eq=False)
class StepMetadata:
    """A step, by group and by layer."""

    batch: BatchMetadata
    groups: tuple[GroupMetadata, ...]
    layers: Mapping[str, GroupMetadata]
    """Layer name -> the metadata of its group."""


class MetadataBuilder:
    """Makes the metadata of steps in buffers that stay where they are.

    What a step was given is overwritten by the next one.

    Args:
        groups: the worker's groups, in the order of the tables.
        tables: their block tables.
        max_num_batched_tokens: most tokens of a step, padding included.
        tensors: the worker's memory, to check that its views and the tables count in
            the same blocks.

    Raises:
        ConfigError: not as many groups as tables, or tables and tensors were made for
            different kernel block sizes.
    """

    def __init__(
        self,
        groups: Sequence[KVCacheGroupSpec],
        tables: BlockTables,
        max_num_batched_tokens: int,
        tensors: KVTensors | None = None,
    ) -> None:
        if len(groups) != len(tables.tables):
            raise ConfigError(f"{len(groups)} groups, {len(tables.tables)} tables")
        if tensors is not None:
            _check_kernel_blocks(tables, tensors)
        self._groups = tuple(groups)
        self._tables = tables
        self._slot_tables = tables.slot_tables()
        reqs, tokens = tables.max_num_reqs, max_num_batched_tokens
        self._starts = self._buffer(reqs + 1)
        self._seq_lens = self._buffer(reqs)
        self._local_lens = self._buffer(reqs)
        self._num_computed = self._buffer(reqs)
        self._rows = self._buffer(tokens)
        self._positions = self._buffer(tokens, torch.int64)
        self._logits_indices = self._buffer(tokens)
        self._slots = torch.zeros(
            len(groups), tokens, dtype=torch.int64, device=tables.device
        )

    def build(
        self,
        step: StepBatch,
        *,
        padded_reqs: int | None = None,
        padded_tokens: int | None = None,
    ) -> StepMetadata:
        """Commit the tables and make the metadata of a step.

        Args:
            step: its requests, in the leading rows of the tables.
            padded_reqs: requests that kernels shall see, for graphs of fixed sizes.
            padded_tokens: tokens likewise.

        Raises:
            CapacityError: more tokens or requests than there is room for.
        """
        tokens = step_tokens(step.num_computed, step.num_scheduled)
        num_reqs, num_tokens = len(step), len(tokens.rows)
        padded_reqs = num_reqs if padded_reqs is None else padded_reqs
        padded_tokens = num_tokens if padded_tokens is None else padded_tokens
        rows, room = self._tables.max_num_reqs, self._slots.shape[1]
        _check_room("requests", num_reqs, padded_reqs, "max_num_seqs", rows)
        _check_room("tokens", num_tokens, padded_tokens, "max_num_batched_tokens", room)
        batch = self._batch(step, tokens, padded_reqs, padded_tokens)
        blocks = self._tables.commit(num_reqs, padded_reqs)
        slot_mappings(self._slot_tables, batch.rows, batch.positions, self._slots)
        groups = tuple(
            self._group(step, batch, group, table) for group, table in enumerate(blocks)
        )
        return StepMetadata(batch, groups, self._by_layer(groups))

    def _batch(
        self, step: StepBatch, tokens: StepTokens, padded_reqs: int, padded_tokens: int
    ) -> BatchMetadata:
        seq_lens = step.num_computed + step.num_scheduled
        logits = _last_tokens(tokens.starts, step.num_drafts)
        sent_lens = _send(self._seq_lens, seq_lens, padded_reqs)
        return BatchMetadata(
            num_reqs=len(step),
            num_tokens=len(tokens.rows),
            max_query_len=int(step.num_scheduled.max(initial=0)),
            max_seq_len=int(seq_lens.max(initial=0)),
            query_start_loc=_send(
                self._starts, tokens.starts, padded_reqs + 1, len(tokens.rows)
            ),
            seq_lens=sent_lens,
            local_lens=self._local_lens_of(seq_lens, sent_lens),
            num_computed=_send(self._num_computed, step.num_computed, padded_reqs),
            rows=_send(self._rows, tokens.rows, padded_tokens, -1),
            positions=_send(self._positions, tokens.positions, padded_tokens),
            logits_indices=_send(self._logits_indices, logits, len(logits)),
            query_lens=tuple(step.num_scheduled.tolist()),
        )

    def _local_lens_of(
        self, seq_lens: npt.NDArray[np.int32], sent: torch.Tensor
    ) -> torch.Tensor:
        place = self._tables.context_parallel
        if place.ranks == 1:
            return sent
        local = place.local_lengths(torch.from_numpy(seq_lens)).numpy()
        return _send(self._local_lens, local, len(sent))

    def _group(
        self, step: StepBatch, batch: BatchMetadata, group: int, blocks: torch.Tensor
    ) -> GroupMetadata:
        shape = self._tables.tables[group].shape
        ranks = self._tables.context_parallel.ranks if shape.is_sharded else 1
        return GroupMetadata(
            batch=batch,
            group=group,
            block_size=shape.kernel_block_size,
            block_table=blocks,
            slots=self._slots[group, : len(batch.rows)],
            kv_lens=batch.local_lens if shape.is_sharded else batch.seq_lens,
            common_prefix_len=_common_prefix_len(step, group, shape.block_size * ranks),
        )

    def _by_layer(self, groups: Sequence[GroupMetadata]) -> Mapping[str, GroupMetadata]:
        return {
            name: metadata
            for group, metadata in zip(self._groups, groups, strict=True)
            for name in group.layer_names
        }

    def _buffer(self, size: int, dtype: torch.dtype = torch.int32) -> MirroredTensor:
        return MirroredTensor(
            size,
            dtype=dtype,
            device=self._tables.device,
            pipeline_depth=self._tables.pipeline_depth,
        )


def _check_room(what: str, count: int, padded: int, key: str, room: int) -> None:
    if count > room:
        raise CapacityError(
            f"a step of {count} {what}, but {key} of this worker is {room}: raise it "
            "to the scheduler's"
        )
    if padded < count:
        raise CapacityError(
            f"a step of {count} {what} can't be padded to {padded}: pad to at least "
            "as many as it has"
        )
    if padded > room:
        raise CapacityError(
            f"a step padded to {padded} {what}, but {key} of this worker is {room}: "
            "pad to no more, or raise it"
        )


def _check_kernel_blocks(tables: BlockTables, tensors: KVTensors) -> None:
    """Only of groups with a view: others have no kernel blocks."""
    for cache in tensors.layers.values():
        if cache.plan is None:
            continue
        mine = tables.tables[cache.group].shape.kernel_block_size
        if mine != cache.plan.block_size:
            raise ConfigError(
                f"group {cache.group}: its block table counts blocks of {mine} tokens "
                f"(kernel_block_size of table_shape), layer {cache.layer!r} those of "
                f"{cache.plan.block_size} (kernel_block_sizes of allocate_kv_cache): "
                "give table_shape the sizes of KVTensors.kernel_block_sizes"
            )


def _send(
    buffer: MirroredTensor, values: npt.NDArray, padded: int, padding: int = 0
) -> torch.Tensor:
    buffer.array[: len(values)] = values
    buffer.array[len(values) : padded] = padding
    return buffer.push(padded)


def _last_tokens(
    starts: npt.NDArray[np.int32], num_drafts: npt.NDArray[np.int32]
) -> npt.NDArray[np.int32]:
    """Of each request the last ``1 + drafts`` tokens."""
    counts = num_drafts + 1
    ends = np.cumsum(counts)
    shift = starts[1:] - ends
    return np.arange(counts.sum(), dtype=np.int32) + np.repeat(shift, counts)


def _common_prefix_len(step: StepBatch, group: int, block_size: int) -> int:
    """A kernel may read the shared blocks once for all requests, without a causal
    mask: every query must come behind them (vLLM 0.19.1 `gpu_model_runner.py`)."""
    if not step.num_common_prefix_blocks or not len(step):
        return 0
    tokens = step.num_common_prefix_blocks[group] * block_size
    return min(tokens, int(step.num_computed.min()) // block_size * block_size)
