"""What connectors and copy engines are told about a layer's memory."""

import pytest

from kvplugin.errors import LayoutMismatchError
from kvplugin.layout import TensorLayout
from kvplugin.worker.describe import (
    describe_caches,
    describe_tensor,
    kv_layout,
    regions,
)
from tests.worker_tensors.cases import (
    any_block_size,
    attention,
    one_layer,
)
from tests.worker_tensors.shared import FLASH, hybrid_keys_first


def test_connectors_get_tensors_and_states_as_bytes() -> None:
    tensors = hybrid_keys_first()
    told = describe_caches(tensors)
    assert set(told) == {"a", "m"}
    assert told["a"].layout == describe_tensor(tensors.layers["a"].tensors[0], 1)
    assert told["m"].layout == TensorLayout((3, 16), (96, 1), 1, "uint8", 0)
    assert told["m"].address == tensors.buffers[0].data_ptr()


def test_pages_that_nobody_may_look_into_are_moved_only() -> None:
    cpu = one_layer(any_block_size("CPU_ATTN@0.32"), "LBHNC", attention(), 3)
    cache = cpu.layers["x"]
    assert [run.nbytes for run in regions(cache)] == [cache.spec.page_size_bytes]
    with pytest.raises(LayoutMismatchError, match=r"CPU_ATTN@0\.32 .* packs keys"):
        kv_layout(cache)
    with pytest.raises(LayoutMismatchError, match="'m' keeps recurrent states"):
        kv_layout(hybrid_keys_first().layers["m"])


def test_regions_of_layers_that_lie_together_start_at_the_layers_own_bytes() -> None:
    tensors = one_layer(FLASH, "BLNHC", attention(), 4)
    page = attention().page_size_bytes
    starts = [regions(tensors.layers[name])[0] for name in ("w", "x", "y")]
    base = tensors.buffers[0].data_ptr()
    assert [region.address - base for region in starts] == [0, page, 2 * page]
    assert {region.stride for region in starts} == {3 * page}
