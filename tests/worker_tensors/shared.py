"""Layers that share buffers, and the bytes that writing a block changes."""

import numpy as np
import torch

from kvplugin.spec import (
    MambaSpec,
    SlidingWindowSpec,
)
from kvplugin.worker.tensors import KVTensors, allocate_kv_cache
from tests.worker_tensors.cases import any_block_size, attention, config_of

FLASH, FLASHINFER = any_block_size("FLASH_ATTN"), any_block_size("FLASHINFER")
FULL = attention()
WINDOW = SlidingWindowSpec(
    block_size=4, num_kv_heads=2, head_size=3, dtype="bfloat16", sliding_window=8
)
STATES = MambaSpec(
    block_size=64,
    shapes=((5, 2), (3,)),
    dtypes=("float32", "bfloat16"),
    page_size_padded=FULL.page_size_bytes,
)


def touched(tensors: KVTensors, layer: str, block: int) -> tuple[int, np.ndarray]:
    """Bytes of the buffer that writing one block of a layer changes."""
    cache = tensors.layers[layer]
    buffer = tensors.buffers[cache.buffer]
    buffer.zero_()
    for tensor in cache.tensors:
        axis = 0 if cache.plan is None else cache.plan.backend.axes.index("block")
        ratio = tensor.shape[axis] // tensors.num_blocks
        part = tensor.narrow(axis, block * ratio, ratio)
        ones = torch.full_like(part, 0, dtype=torch.uint8) + 255
        whole = ones.unsqueeze(-1).expand(*ones.shape, part.element_size())
        part.copy_(whole.contiguous().view(part.dtype).squeeze(-1))
    changed = np.flatnonzero(buffer.numpy())
    buffer.zero_()
    return cache.buffer, changed


def hybrid_keys_first() -> KVTensors:
    full = attention()
    states = MambaSpec(
        block_size=64,
        shapes=((4,),),
        dtypes=("float32",),
        page_size_padded=full.page_size_bytes,
    )
    config = config_of([(full, ["a"]), (states, ["m"])], 3)
    return allocate_kv_cache(config, {"a": FLASH}, "NHD")
