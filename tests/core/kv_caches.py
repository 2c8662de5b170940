"""KV caches of every backend as numpy arrays: what a layout's arithmetic is held to.

An array is allocated in a backend's physical order, full of noise, and looked at in
its logical one; numpy's indexing then says where an element is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvplugin.layout import HeadSlice, KVLayout, TensorLayout

LAYERS = 2
"""Of caches that keep several layers in one array; the last one is used."""
MARGIN = 64
"""Bytes of noise before and after a cache: the canaries."""

BACKENDS = {
    # name: (logical axes, physical order); (2, N, bs, H, D) and its permutations
    "FlashAttention NHD": ("kv block token head dim", "kv block token head dim"),
    "FlashAttention HND": ("kv block token head dim", "kv block head token dim"),
    "FlashAttention NHD, all layers": (
        "kv block token head dim",
        "block layer kv token head dim",
    ),
    "FlashAttention HND, all layers": (
        "kv block token head dim",
        "block head layer kv token dim",
    ),
    "FlashInfer NHD": ("block kv token head dim", "block kv token head dim"),
    "FlashInfer HND": ("block kv token head dim", "block kv head token dim"),
    "FlashInfer HND, all layers": (
        "block kv token head dim",
        "block kv head layer token dim",
    ),
    "CPU": ("kv block head token dim", "kv block head token dim"),
    "CPU, halves of a page": (
        "block head kv token dim",
        "layer block head kv token dim",
    ),
}
FUSED_BACKENDS = {
    # a row is a key and its value, which may differ in size (DiffKV)
    "DiffKV NHD": ("block token head dim", "block token head dim"),
    "DiffKV HND": ("block token head dim", "block head token dim"),
    "fused LBNHC": ("block head token dim", "layer block token head dim"),
    "fused LBHNC": ("block head token dim", "layer block head token dim"),
    "fused LHBNC": ("block head token dim", "layer head block token dim"),
    "fused BLHNC": ("block head token dim", "block layer head token dim"),
    "fused BLNHC": ("block head token dim", "block layer token head dim"),
    "fused BHLNC": ("block head token dim", "block head layer token dim"),
}
LATENT_BACKENDS = {
    "MLA": ("block token dim", "block token dim"),
    "MLA, all layers": ("block token dim", "block layer token dim"),
    "MLA with a head": ("block head token dim", "layer block head token dim"),
}
PACKED_BACKENDS = {
    # The one page with keys transposed over it, [dim, token], then values.
    "CPU attention": ("block head kv token dim", "block head kv token dim"),
    "CPU attention, all layers": (
        "block head kv token dim",
        "block layer head kv token dim",
    ),
}
ALL_BACKENDS = BACKENDS | FUSED_BACKENDS | LATENT_BACKENDS | PACKED_BACKENDS


@dataclass(frozen=True)
class Sizes:
    """What a token keeps: elements of a key and a value, or of a latent."""

    heads: int
    key: int
    value: int
    dtype: str = "uint32"


class Cache:
    """One layer's memory in a backend's order, `shift` bytes after a multiple of 64."""

    def __init__(
        self,
        backend: str,
        sizes: Sizes,
        blocks: int,
        tokens: int,
        seed: int = 0,
        shift: int = 0,
    ) -> None:
        logical, physical = (axes.split() for axes in ALL_BACKENDS[backend])
        fused = backend in FUSED_BACKENDS
        extents = {
            "kv": 2,
            "layer": LAYERS,
            "block": blocks,
            "token": tokens,
            "head": sizes.heads,
            "dim": sizes.key + sizes.value if fused else sizes.key,
        }
        assert fused or backend in LATENT_BACKENDS or sizes.key == sizes.value
        shape = [extents[axis] for axis in physical]
        self.tokens, self.axes, dtype = tokens, logical, np.dtype(sizes.dtype)
        nbytes = int(np.prod(shape)) * dtype.itemsize
        self.buffer, first = _noise(nbytes, shift, seed)
        self.memory = self.buffer[first : first + nbytes]
        array = self.memory.view(dtype).reshape(shape)
        order = [physical.index(axis) for axis in logical]
        if "layer" in physical:
            array = array.transpose([physical.index("layer"), *order])[-1]
        else:
            array = array.transpose(order)
        self.array = array
        self.address = array.ctypes.data
        self.layout = KVLayout.of_tensor(
            TensorLayout(
                array.shape,
                array.strides,
                dtype.itemsize,
                sizes.dtype,
                logical.index("block"),
            ),
            logical,
            key_size=sizes.key if fused else None,
            name=backend,
        )
        self.parts = self._parts(sizes.key if fused else None)
        if backend in PACKED_BACKENDS:
            self._transpose_keys()

    def _parts(self, key_size: int | None) -> list[np.ndarray]:
        """Views [blocks, tokens, heads, dim]: keys and values, or a latent."""
        array, axes = self.array, list(self.axes)
        if "head" not in axes:
            array = array[..., np.newaxis, :]
            axes.insert(-1, "head")
        by_token = [axes.index(axis) for axis in ("block", "token", "head", "dim")]
        if "kv" in axes:
            kv = axes.index("kv")
            moved = array.transpose([kv, *by_token])
            return [moved[0], moved[1]]
        moved = array.transpose(by_token)
        if key_size is None:
            return [moved]
        return [moved[..., :key_size], moved[..., key_size:]]

    def _transpose_keys(self) -> None:
        """Keys [token, dim] become [dim, token] in the same bytes."""
        keys = self.parts[0]
        blocks, tokens, heads, dim = keys.shape
        item, (block, _, head, _) = keys.itemsize, keys.strides
        self.parts[0] = np.lib.stride_tricks.as_strided(
            keys, (blocks, tokens, heads, dim), (block, item, head, tokens * item)
        )
        key, value = self.layout.parts
        columns = replace(
            key, token_stride=item, columns=dim, column_stride=tokens * item
        )
        self.layout = replace(self.layout, parts=(columns, value))

    def slots(self, ids: Sequence[int], count: int) -> tuple[np.ndarray, np.ndarray]:
        """Block and place of the first `count` tokens of a row of blocks."""
        positions = np.arange(count)
        return np.asarray(ids, np.int64)[positions // self.tokens], (
            positions % self.tokens
        )

    def write(self, ids: Sequence[int], parts: Sequence[np.ndarray]) -> None:
        """Write content [tokens, heads, dim] of each part into a row of blocks."""
        for part, rows in zip(self.parts, parts, strict=True):
            part[self.slots(ids, len(rows))] = rows

    def read(self, ids: Sequence[int], count: int) -> list[np.ndarray]:
        return [part[self.slots(ids, count)] for part in self.parts]


def _noise(nbytes: int, shift: int, seed: int) -> tuple[np.ndarray, int]:
    """A buffer with margins, and where `nbytes` between them begin."""
    generator = np.random.default_rng(seed)
    buffer = generator.integers(0, 256, nbytes + 4 * MARGIN, dtype=np.uint8)
    first = MARGIN + -buffer.ctypes.data % 64 + shift
    return buffer[: first + nbytes + MARGIN], first


def after_copy(
    source: Cache,
    target: Cache,
    ids: tuple[Sequence[int], Sequence[int]],
    count: int,
    heads: HeadSlice | None = None,
) -> np.ndarray:
    """What the target's buffer holds once `count` tokens of a row of blocks have been
    carried over: by numpy's indexing, everything else as it is."""
    before, slots = target.buffer.copy(), target.slots(ids[1], count)
    first_s, first_t, width = heads or (0, 0, source.layout.heads)
    for part, rows in zip(target.parts, source.read(ids[0], count), strict=True):
        mine = part[:, :, first_t : first_t + width]
        mine[slots] = rows[:, first_s : first_s + width]
    expected = target.buffer.copy()
    target.buffer[:] = before
    return expected


def content(sizes: Sizes, tokens: int, *, latent: bool = False) -> list[np.ndarray]:
    """Values that say which part, token, head and element they are: [tokens, heads,
    dim] each. Those of one byte say it by a hash."""
    dims = [sizes.key] if latent else [sizes.key, sizes.value]
    parts, first = [], 1
    for dim in dims:
        shape = (tokens, sizes.heads, dim)
        index = np.arange(first, first + int(np.prod(shape)), dtype=np.uint64)
        first += len(index)
        if np.dtype(sizes.dtype).itemsize == 1:
            index = index * np.uint64(2654435761) >> np.uint64(13)
        parts.append(index.astype(sizes.dtype).reshape(shape))
    return parts
