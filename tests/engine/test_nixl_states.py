"""How ranks share recurrent states: what is said of vLLM's own shapes."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.v1.kv_cache_interface import MambaSpec

from kvplugin.integration.vllm.states import conv_layout, parts_of_states
from kvplugin.layout import Run, StatePart
from tests.engine.version import is_019

Shapes = Callable[[int], tuple[tuple[int, ...], ...]]


def mamba1(ranks: int) -> Any:
    return MambaStateShapeCalculator.mamba1_state_shape(
        tp_world_size=ranks, intermediate_size=64, state_size=4, conv_kernel=4
    )


def mamba2(groups: int) -> Shapes:
    def shapes(ranks: int) -> Any:
        return MambaStateShapeCalculator.mamba2_state_shape(
            tp_world_size=ranks,
            intermediate_size=64,
            n_groups=groups,
            num_heads=8,
            head_dim=8,
            state_size=16,
            conv_kernel=4,
        )

    return shapes


def delta_net(ranks: int) -> Any:
    return MambaStateShapeCalculator.gated_delta_net_state_shape(
        tp_world_size=ranks,
        num_k_heads=4,
        num_v_heads=8,
        head_k_dim=8,
        head_v_dim=16,
        conv_kernel_size=4,
    )


def short_conv(ranks: int) -> Any:
    return MambaStateShapeCalculator.short_conv_state_shape(
        tp_world_size=ranks, intermediate_size=64, conv_kernel=3
    )


def linear(ranks: int) -> Any:
    return MambaStateShapeCalculator.linear_attention_state_shape(
        num_heads=8, tp_size=ranks, head_dim=4
    )


KINDS: dict[str, tuple[Shapes, str, str, Any]] = {
    "mamba 1": (mamba1, "MAMBA1", "mamba1", None),
    "mamba 2, one group": (mamba2(1), "MAMBA2", "mamba2", 1),
    "mamba 2, a group a rank": (mamba2(4), "MAMBA2", "mamba2", 4),
    "mamba 2, groups": (mamba2(8), "MAMBA2", "mamba2", 8),
    "delta net": (delta_net, "GDN_ATTN", "gdn_attention", None),
    "short convolution": (short_conv, "SHORT_CONV", "short_conv", None),
    "linear attention": (linear, "LINEAR", "linear_attention", None),
}
"""Shapes, vLLM's names of 0.32 and 0.19, groups of the model."""


def kind_of(new: str, old: str) -> Any:
    if is_019():
        return old
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

    return MambaAttentionBackendEnum[new]


def spec_of(name: str, ranks: int, **changes: Any) -> tuple[Any, Any]:
    """vLLM's spec of a rank, and its layer."""
    shapes, new, old, groups = KINDS[name]
    found = shapes(ranks)
    fields = {
        "block_size": 16,
        "shapes": found,
        "dtypes": (torch.bfloat16, torch.float32)[-len(found) :],
        "mamba_type": kind_of(new, old),
    }
    layer = SimpleNamespace(norm=SimpleNamespace(n_groups=groups))
    return MambaSpec(**(fields | changes)), layer


@pytest.fixture(params=["SD", "DS"])
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Which axis of a convolution's state comes first; None: vLLM chooses."""
    if is_019() and request.param == "DS":
        pytest.skip("vLLM 0.19 has one order")
    monkeypatch.delenv("VLLM_SSM_CONV_STATE_LAYOUT", raising=False)
    if request.param is not None:
        monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", request.param)
    asked = getattr(mamba_utils, "get_conv_state_layout", None)
    if asked is not None:
        asked.cache_clear()
    yield request.param
    if asked is not None:
        asked.cache_clear()


@pytest.mark.parametrize("name", KINDS)
def test_the_parts_fill_the_page_on_any_number_of_ranks(name, order):
    said = []
    for ranks in (1, 2, 4):
        spec, layer = spec_of(name, ranks)
        parts = parts_of_states(spec, layer, ranks)
        filled = [0] * spec.page_size_bytes
        page = Run(0, len(filled), len(filled))
        for part in parts:
            assert part.rows == max(1, part.total_rows // ranks)
            for run in part.runs(page, 0, part.rows):
                for byte in range(run.offset, run.offset + run.nbytes):
                    filled[byte] += 1
        assert set(filled) == {1}
        said.append([(p.name, p.row_bytes, p.total_rows, p.places) for p in parts])
    # The same rows over all ranks, however many there are.
    assert said[0] == said[1] == said[2]


@pytest.mark.skipif(is_019(), reason="vLLM 0.19 does not split states")
@pytest.mark.parametrize(
    "name", ["mamba 1", "mamba 2, a group a rank", "mamba 2, groups", "delta net"]
)
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("order", ["DS"], indirect=True)
def test_projections_are_where_vllm_has_them(name, ranks, order):
    """Against vLLM's own split, which wants the channels first."""
    from vllm.distributed.kv_transfer.kv_connector.v1.ssm_conv_transfer_utils import (
        derive_mamba_conv_split,
    )

    spec, layer = spec_of(name, ranks)
    parts = parts_of_states(spec, layer, ranks)
    split = derive_mamba_conv_split(spec, ranks)
    ours = [(p.offset, p.rows * p.row_bytes) for p in parts if p.name != "matrix"]
    assert ours == split.local_conv_offsets
    (matrix,) = [part for part in parts if part.name == "matrix"]
    assert (matrix.offset, matrix.rows * matrix.row_bytes) == split.ssm_sizes


@pytest.mark.parametrize("order", [None, "SD", "DS"], indirect=True)
def test_the_order_is_vllms_own(order):
    assert conv_layout() == (order or "SD")
    (shape,) = short_conv(1)
    (part,) = parts_of_states(*spec_of("short convolution", 1), 1)
    places = 1 if shape[0] == 64 else shape[0]
    assert (part.rows, part.places) == (64, places)


def test_a_single_group_is_on_every_rank(order):
    spec, layer = spec_of("mamba 2, one group", 4)
    parts = parts_of_states(spec, layer, 4)
    rows = {part.name: part.total_rows for part in parts}
    assert rows == {"x": 8, "B": 1, "C": 1, "matrix": 8}


@pytest.mark.skipif(is_019(), reason="vLLM 0.19 has no copies of states")
def test_copies_are_one_row(order):
    spec, layer = spec_of("delta net", 1, tp_replicated=True)
    parts = parts_of_states(spec, layer, 2)
    assert [(p.rows, p.total_rows) for p in parts] == [(1, 1), (1, 1)]
    assert parts[-1].end == spec.page_size_bytes


@pytest.mark.parametrize(
    ("name", "changes", "groups"),
    [
        ("mamba 2, groups", {}, 0),
        ("mamba 2, groups", {"shapes": ((3, 7), (8, 8, 16))}, 8),
        ("delta net", {"shapes": ((3, 7), (8, 16, 8))}, 0),
        ("delta net", {"shapes": ((3, 128), (8, 16))}, 0),
        ("delta net", {"shapes": ((3, 256), (8, 16, 8), (8, 4)), "dtypes": None}, 0),
        ("linear attention", {"mamba_type": "somebodys"}, 0),
    ],
)
def test_what_nobody_knows_has_no_parts(name, changes, groups):
    if "dtypes" in changes:
        changes = changes | {"dtypes": (torch.bfloat16,) * len(changes["shapes"])}
    spec, layer = spec_of(name, 1, **changes)
    layer.norm.n_groups = groups
    assert parts_of_states(spec, layer, 1) == ()
    assert parts_of_states(spec, None, 1) == ()


def test_parts_are_tuples_of_numbers():
    """What goes over the wire holds nothing of torch's."""
    spec, layer = spec_of("delta net", 1)
    for part in parts_of_states(spec, layer, 1):
        assert type(part) is StatePart
        assert all(type(value) in (int, str) for value in part)
