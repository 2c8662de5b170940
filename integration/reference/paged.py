"""Token histories in KV blocks: written at slots, read through the block table."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from kvplugin.errors import IntegrityError
from kvplugin.integration.reference.backends import row_views
from kvplugin.integration.reference.history import Tensors
from kvplugin.integration.reference.layers import Memory
from kvplugin.kernels import dispatch
from kvplugin.kernels.records import unpack_ds_mla
from kvplugin.worker.tensors import LayerCache


class RowStore(Protocol):
    """The rows of one layer in its KV tensor."""

    def write(self, rows: Tensors, slots: torch.Tensor) -> None:
        """Write rows [tokens, ...] at slots int64 [tokens]."""

    def read(self, blocks: torch.Tensor, offsets: torch.Tensor) -> Tensors:
        """The rows at these places, in the model's dtype."""


class KVRows:
    """Keys and values.

    Args:
        cache: of the layer.
        dtype: the model's.
    """

    def __init__(self, cache: LayerCache, dtype: torch.dtype) -> None:
        self._key, self._value = row_views(cache)
        self._dtype = dtype

    def write(self, rows: Tensors, slots: torch.Tensor) -> None:
        """See `RowStore.write`."""
        key, value = (_writable(part, self._key.dtype) for part in rows)
        dispatch.write_kv(key, value, self._key, self._value, slots)

    def read(self, blocks: torch.Tensor, offsets: torch.Tensor) -> Tensors:
        """See `RowStore.read`."""
        return tuple(
            _gather(view, blocks, offsets).to(self._dtype)
            for view in (self._key, self._value)
        )


class LatentRows:
    """MLA's latents, each with its rotary part.

    Args:
        cache: of the layer.
        dtype: the model's.
        latent: elements of a latent.
    """

    def __init__(self, cache: LayerCache, dtype: torch.dtype, latent: int) -> None:
        (view,) = row_views(cache)
        self._view = view[:, :, 0]
        self._dtype = dtype
        self._latent = latent

    def write(self, rows: Tensors, slots: torch.Tensor) -> None:
        """See `RowStore.write`."""
        latent, rope = (_writable(part, self._view.dtype) for part in rows)
        dispatch.write_latent(latent, rope, self._view, slots)

    def read(self, blocks: torch.Tensor, offsets: torch.Tensor) -> Tensors:
        """See `RowStore.read`."""
        rows = _gather(self._view, blocks, offsets).to(self._dtype)
        return rows[:, : self._latent], rows[:, self._latent :]


class RecordRows:
    """The same as `fp8_ds_mla` records.

    Args:
        cache: of the layer.
        dtype: the model's.
    """

    def __init__(self, cache: LayerCache, dtype: torch.dtype) -> None:
        (view,) = row_views(cache)
        self._view = view[:, :, 0]
        self._dtype = dtype

    def write(self, rows: Tensors, slots: torch.Tensor) -> None:
        """See `RowStore.write`."""
        latent, rope = (_writable(part, torch.uint8) for part in rows)
        dispatch.write_ds_mla(latent, rope, self._view, slots)

    def read(self, blocks: torch.Tensor, offsets: torch.Tensor) -> Tensors:
        """See `RowStore.read`."""
        parts = unpack_ds_mla(self._view[blocks, offsets])
        return tuple(part.to(self._dtype) for part in parts)


def row_store(
    memory: Memory, cache: LayerCache, dtype: torch.dtype, latent: int
) -> RowStore:
    """The store for a layer that keeps rows.

    Args:
        memory: what it keeps.
        cache: where.
        dtype: the model's.
        latent: elements of MLA's latent.
    """
    makers: dict[Memory, Callable[[], RowStore]] = {
        Memory.KEYS_AND_VALUES: lambda: KVRows(cache, dtype),
        Memory.ENCODER: lambda: KVRows(cache, dtype),
        Memory.LATENTS: lambda: LatentRows(cache, dtype, latent),
        Memory.RECORDS: lambda: RecordRows(cache, dtype),
    }
    return makers[memory]()


class PagedTokens:
    """The rows of a step's requests in one layer.

    Args:
        store: the layer's rows.
        table: kernel blocks, int32 [requests, columns].
        slots: of the rows that will be appended, int64.
        ends: tokens of each request after the step.
        block_size: tokens of a kernel block.
        num_null: leading kernel blocks that are the null block.
        sink: kernel blocks that all requests share.
    """

    def __init__(
        self,
        store: RowStore,
        table: torch.Tensor,
        slots: torch.Tensor,
        ends: Sequence[int],
        *,
        block_size: int,
        num_null: int = 1,
        sink: torch.Tensor | None = None,
    ) -> None:
        self._store = store
        self._table = table
        self._slots = slots
        self._ends = ends
        self._block_size = block_size
        self._num_null = num_null
        self._sink = sink

    def append(self, *rows: torch.Tensor) -> None:
        """See `TokenHistory.append`."""
        self._store.write(rows, self._slots)

    def read(self, index: int, first: int) -> Tensors:
        """See `TokenHistory.read`.

        Raises:
            IntegrityError: a token that is to be seen has lost its block.
        """
        tokens = torch.arange(first, self._ends[index], device=self._table.device)
        blocks = self._table[index, tokens // self._block_size]
        if bool((blocks < self._num_null).any()):
            raise IntegrityError(
                f"tokens {first} to {self._ends[index]} of the request in row {index} "
                f"are read, their blocks are {blocks.unique().tolist()}: the null "
                "block is among them"
            )
        return self._store.read(blocks.long(), tokens % self._block_size)

    def read_sink(self) -> Tensors:
        """See `TokenHistory.read_sink`."""
        if self._sink is None:
            return ()
        blocks = self._sink.repeat_interleave(self._block_size)
        offsets = torch.arange(len(blocks), device=blocks.device) % self._block_size
        return self._store.read(blocks, offsets)


def _writable(rows: torch.Tensor, target: torch.dtype) -> torch.Tensor:
    """Rows whose last dimension is contiguous, of a dtype that can be rounded to
    `target`."""
    if rows.dtype == torch.float64 and target != torch.float64:
        rows = rows.float()
    return rows.contiguous()


def _gather(
    view: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """Rows of any dtype: torch indexes no fp8."""
    if view.dtype.itemsize == 1:
        return view.view(torch.uint8)[blocks, offsets].view(view.dtype)
    return view[blocks, offsets]
