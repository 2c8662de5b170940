"""Layers with KV memory of real bytes, in any layout."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvplugin.contract import GroupInfo, GroupKind, KVTensor
from kvplugin.layout import PageLayout, TensorLayout

BLOCKS = 8


@dataclass
class Layer:
    """One layer's KV memory: a view of some buffer, and where its blocks are."""

    view: npt.NDArray[np.generic]
    axis: int = 0
    """Of the view, which counts blocks or equal parts of blocks."""
    page_bytes: int = 0
    """Of a page with room to spare; 0: the page is what the tensor has."""
    before: npt.NDArray[np.generic] = field(init=False)

    def __post_init__(self) -> None:
        self.remember()

    @property
    def page(self) -> PageLayout:
        nbytes = self.view.size // BLOCKS * self.view.itemsize
        return PageLayout(self.page_bytes or nbytes, BLOCKS, padded=self.page_bytes > 0)

    @property
    def tensor(self) -> KVTensor:
        layout = TensorLayout(
            shape=self.view.shape,
            strides=self.view.strides,
            itemsize=self.view.itemsize,
            dtype=str(self.view.dtype),
            block_axis=self.axis,
        )
        return KVTensor(self.view.ctypes.data, layout)

    def remember(self) -> None:
        """Keep what all blocks hold now."""
        self.before = self.view.copy()

    def was(self, block: int) -> npt.NDArray[np.generic]:
        """What the block held at the last `remember`."""
        return self._part(self.before, block)

    def now(self, block: int) -> npt.NDArray[np.generic]:
        """What the block holds."""
        return self._part(self.view, block)

    def now_is(self, block: int, value: int) -> None:
        """Fill the block's bytes."""
        parts = self.view.shape[self.axis] // BLOCKS
        index = [slice(None)] * self.view.ndim
        index[self.axis] = slice(block * parts, (block + 1) * parts)
        self.view[tuple(index)] = value

    def _part(
        self, array: npt.NDArray[np.generic], block: int
    ) -> npt.NDArray[np.generic]:
        parts = array.shape[self.axis] // BLOCKS
        return array.take(range(block * parts, (block + 1) * parts), self.axis)


def noise(*shape: int, dtype: str = "uint8", seed: int = 0) -> npt.NDArray[np.generic]:
    """Memory full of random bits."""
    chance = np.random.default_rng(seed)
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(bytearray(chance.bytes(nbytes)), dtype).reshape(shape)


def group_of(
    layers: list[Layer], index: int = 0, *, reusable: bool = True
) -> GroupInfo:
    names = {f"{index}.{i}": layer.page for i, layer in enumerate(layers)}
    return GroupInfo(
        index, GroupKind.FULL, block_size=16, layers=names, reusable=reusable
    )


def tensors_of(layers: list[Layer], index: int = 0) -> dict[str, KVTensor]:
    return {f"{index}.{i}": layer.tensor for i, layer in enumerate(layers)}
