"""The example of ten full and twenty window layers, and what people get wrong."""

import random

import numpy as np
import torch

from kvplugin.worker.tensors import KVTensors, allocate_kv_cache
from tests.worker_tensors.cases import config_of
from tests.worker_tensors.shared import FLASH, FULL, WINDOW, touched


def seed_example() -> KVTensors:
    """10 full layers and 20 windows: three groups, ten buffers (seed, section 15)."""
    groups = [
        (FULL, [f"full.{i}" for i in range(10)]),
        (WINDOW, [f"sw.{i}" for i in range(10)]),
        (WINDOW, [f"sw.{i}" for i in range(10, 20)]),
    ]
    config = config_of(groups, 12)
    backends = {name: FLASH for _, names in groups for name in names}
    return allocate_kv_cache(config, backends, "NHD")


def test_ten_full_and_twenty_window_layers_share_ten_buffers() -> None:
    tensors = seed_example()
    assert len(tensors.buffers) == 10
    for i in range(10):
        trio = (f"full.{i}", f"sw.{i}", f"sw.{i + 10}")
        assert {tensors.layers[name].buffer for name in trio} == {i}
    # full has blocks 0-6 of a request, the windows 7, 8 and 9, 10.
    tables = {"full.0": range(7), "sw.0": (7, 8), "sw.10": (9, 10)}
    for layer, blocks in tables.items():
        for block in blocks:
            write_block(tensors, layer, block)
    for layer, blocks in tables.items():
        for block in blocks:
            assert block_is(tensors, layer, block)


def write_block(tensors: KVTensors, layer: str, block: int) -> None:
    tensors.layers[layer].tensors[0][:, block] = 8 * block + len(layer)


def block_is(tensors: KVTensors, layer: str, block: int) -> bool:
    content = tensors.layers[layer].tensors[0][:, block]
    return bool((content == 8 * block + len(layer)).all())


def test_block_7_of_a_window_never_touches_block_3_of_full_attention() -> None:
    tensors = seed_example()
    write_block(tensors, "full.0", 3)
    before = tensors.buffers[0].clone()
    write_block(tensors, "sw.0", 7)
    changed = np.flatnonzero((tensors.buffers[0] != before).numpy())
    assert len(changed)
    assert not np.isin(changed, touched(seed_example(), "full.0", 3)[1]).any()
    assert block_is(tensors, "full.0", 3)
    # Only the pool keeps them apart: the same id is the same memory.
    write_block(tensors, "sw.0", 3)
    assert not block_is(tensors, "full.0", 3)


def test_a_group_shares_block_ids_and_no_content() -> None:
    # Misconception 18.1: layers of a group have a table in common, not their KV.
    tensors = seed_example()
    tensors.layers["full.0"].tensors[0][:, 5] = 1
    assert not any(tensors.layers[f"full.{i}"].tensors[0].any() for i in range(1, 10))


def test_a_block_id_is_no_token_position() -> None:
    # Misconception 18.3: position -> place in the row -> block id -> memory.
    cache = seed_example().layers["full.0"].tensors[0]
    row = random.Random(3).sample(range(1, 12), 5)
    assert row != sorted(row)
    for position in range(20):
        cache[0, row[position // 4], position % 4] = position
    in_order = cache[0][row].flatten(0, 1)[:, 0, 0]
    assert in_order.tolist() == list(range(20))
    assert cache[0].flatten(0, 1)[:20, 0, 0].tolist() != list(range(20))


def test_nhd_and_hnd_are_different_memory() -> None:
    # Misconception 18.4: the same tensor to attention, other bytes to who moves them.
    config = config_of([(FULL, ["a"])], 3)
    made = [allocate_kv_cache(config, {"a": FLASH}, x) for x in ("NHD", "HND")]
    numbers = torch.arange(made[0].layers["a"].tensors[0].numel()).view(2, 3, 4, 2, 3)
    for tensors in made:
        tensors.layers["a"].tensors[0].copy_(numbers)
    nhd, hnd = (tensors.layers["a"].tensors[0] for tensors in made)
    assert torch.equal(nhd, hnd)
    assert nhd.stride() != hnd.stride()
    assert not torch.equal(made[0].buffers[0], made[1].buffers[0])
