"""What the bytes of a stored block depend on, beside what its key says.

A key is an engine's own block hash and a group (`kvplugin.hashing.make_key`). The hash
covers what belongs to a request: its tokens and all before them, its adapter, its cache
salt, its media items and prompt embeddings. Two requests that differ in one of these
have different keys, and nothing here says it again.

The rest belongs to an engine: which model at which weights, in which numbers, laid out
how, hashed how, on which rank. It is one `StoreIdentity`, made once at the start. A
tier in the engine's own memory holds blocks of one identity only and ends with it;
there it tells a worker half that it serves another engine than the scheduler half
thinks. A tier that outlives the engine keeps blocks of several apart by it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from functools import cached_property
from hashlib import sha256
from typing import Final, TypeAlias, cast

import msgpack

from kvplugin.contract import (
    EngineInfo,
    GroupInfo,
    GroupKind,
    KVTensor,
    ModelIdentity,
)
from kvplugin.layout import PageLayout, TensorLayout

FORMAT: Final = 1
"""Of stored blocks; raised whenever the same identity comes to mean other bytes."""

Path: TypeAlias = tuple[str | int, ...]
Leaf: TypeAlias = str | int | bool | tuple[str | int, ...]

_OF_A_RANK: Final = frozenset({"rank", "backends", "has_drafter", "layers"})
"""Fields in which ranks of one engine may differ: a pipeline's ranks hold layers of
their own, and only the last one a drafter's."""


@dataclass(frozen=True)
class TensorIdentity:
    """How a layer's tensor divides the bytes of a block; nothing that depends on how
    many blocks there are."""

    dtype: str
    itemsize: int
    parts: int
    """Entries of the block axis to a block."""
    shape: tuple[int, ...]
    """Of one such entry."""
    strides: tuple[int, ...]
    """Along the same axes, in bytes; 0 for an axis outside the block axis, whose steps
    lead to another run of the block's bytes."""

    @classmethod
    def of(cls, tensor: TensorLayout, num_blocks: int) -> "TensorIdentity":
        """Of a view over a pool of `num_blocks` blocks."""
        axis = tensor.block_axis
        step = tensor.strides[axis]
        inside = [i for i in range(len(tensor.shape)) if i != axis]
        return cls(
            tensor.dtype,
            tensor.itemsize,
            tensor.shape[axis] // num_blocks,
            tuple(tensor.shape[i] for i in inside),
            tuple(s if (s := tensor.strides[i]) < step else 0 for i in inside),
        )


@dataclass(frozen=True)
class LayerIdentity:
    """One layer's part of a block."""

    name: str
    page_bytes: int
    padded: bool
    interior: str
    tensor: TensorIdentity | None = None
    """None where the engine's tensors are not known."""

    @classmethod
    def of(
        cls, name: str, page: PageLayout, tensor: KVTensor | None
    ) -> "LayerIdentity":
        known = (
            None
            if tensor is None
            else TensorIdentity.of(tensor.layout, page.num_blocks)
        )
        return cls(name, page.page_bytes, page.padded, page.interior, known)


@dataclass(frozen=True)
class GroupIdentity:
    """One group's blocks."""

    kind: GroupKind
    block_size: int
    window: int
    has_drafter: bool
    layers: tuple[LayerIdentity, ...]
    """In the order in which their bytes follow each other in a stored block."""

    @classmethod
    def of(cls, group: GroupInfo, tensors: Mapping[str, KVTensor]) -> "GroupIdentity":
        return cls(
            group.kind,
            group.block_size,
            group.window,
            group.has_drafter,
            tuple(
                LayerIdentity.of(name, page, tensors.get(name))
                for name, page in group.layers.items()
            ),
        )


@dataclass(frozen=True)
class StoreIdentity:
    """Everything of an engine and rank that the bytes of its stored blocks depend on:
    where it is the same, blocks of one key are the same bytes."""

    model: ModelIdentity
    hash_block_size: int
    """Tokens of a hash: with another one the same key names other tokens."""
    world_size: int
    tp_size: int
    """Ranks that share a layer's heads: which of them a rank holds."""
    rank: int
    groups: tuple[GroupIdentity, ...]
    format: int = FORMAT

    @classmethod
    def of(
        cls, engine: EngineInfo, tensors: Mapping[str, KVTensor] | None = None
    ) -> "StoreIdentity":
        """Of an engine and its rank.

        Args:
            engine: whose blocks they are.
            tensors: its KV memory by layer, where it is known.
        """
        return cls(
            engine.model,
            engine.hash_block_size,
            engine.world_size,
            engine.tp_size,
            engine.rank,
            tuple(GroupIdentity.of(group, tensors or {}) for group in engine.groups),
        )

    @cached_property
    def digest(self) -> str:
        """Of all fields: equal for equal identities, in any process."""
        return _digest(self._leaves())

    @cached_property
    def shared(self) -> str:
        """Of the fields in which all ranks of one engine agree, its scheduler half
        included: the model, its dtype, quantization and weights, the hashes, the number
        of ranks, and each group's kind, block size and window."""
        return _digest(
            (path, value)
            for path, value in self._leaves()
            if _OF_A_RANK.isdisjoint(path)
        )

    def difference(self, other: "StoreIdentity") -> str:
        """Each field in which `other` differs, with both values, this one's first;
        empty if none does."""
        mine, theirs = dict(self._leaves()), dict(other._leaves())
        return ", ".join(
            f"{_name(path)}: {_shown(mine, path)} and {_shown(theirs, path)}"
            for path in {**mine, **theirs}
            if path not in mine or path not in theirs or mine[path] != theirs[path]
        )

    def _leaves(self) -> Iterator[tuple[Path, Leaf]]:
        return _leaves((), self)


def _leaves(path: Path, value: object) -> Iterator[tuple[Path, Leaf]]:
    """Every field with the way to it. Fields go by name and entries by number, so no
    value can stand for another field's, and no order matters but that of entries."""
    if is_dataclass(value):
        for field in fields(value):
            yield from _leaves((*path, field.name), getattr(value, field.name))
    elif isinstance(value, tuple) and value and is_dataclass(value[0]):
        for number, entry in enumerate(value):
            yield from _leaves((*path, number), entry)
    elif isinstance(value, StrEnum):
        yield path, value.value
    elif value is not None:
        yield path, cast(Leaf, value)


def _digest(leaves: Iterator[tuple[Path, Leaf]]) -> str:
    """MessagePack writes types and lengths, so different leaves are different bytes."""
    packed: bytes = msgpack.packb(sorted(leaves), unicode_errors="surrogatepass")
    return sha256(packed).hexdigest()


def _name(path: Path) -> str:
    """``groups[0].block_size``, for people."""
    text = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path)
    return text.removeprefix(".")


def _shown(leaves: Mapping[Path, Leaf], path: Path) -> str:
    return repr(leaves[path]) if path in leaves else "nothing"
