"""The table is consistent, open to anyone, and what vLLM's own classes say."""

import itertools
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvplugin.errors import ConfigError
from kvplugin.layout import TensorLayout
from kvplugin.spec import FullAttentionSpec, MLAAttentionSpec
from kvplugin.worker.backend_table import BACKENDS, find_backend
from kvplugin.worker.backends import (
    LAYOUTS,
    BackendLayout,
    canonical_layout,
    is_block_compact,
    is_cross_layer,
)
from kvplugin.worker.describe import kv_layout
from kvplugin.worker.kernel_blocks import MultipleOf, reads_blocks_of
from kvplugin.worker.tensors import allocate_kv_cache
from kvplugin.worker.views import AttentionPlan, attention_view
from tests.oracles import V019, V032
from tests.worker_tensors.cases import (
    attention,
    config_of,
    memory_from,
    spec_for,
    write,
)
from tests.worker_tensors.vllm_views import ask

SIZES_019 = (6, 64, 2, 8)
"""Blocks, tokens, heads, elements."""


def test_names_and_aliases() -> None:
    assert canonical_layout("nhd") == canonical_layout("LBNHC") == "LBNHC"
    assert canonical_layout("HND") == "LBHNC"
    assert canonical_layout("NHD", layers=True) == "BLNHC"
    assert canonical_layout("HND", layers=True) == "BHLNC"
    assert [x for x in LAYOUTS if is_cross_layer(x)] == ["BLNHC", "BLHNC", "BHLNC"]
    assert [x for x in LAYOUTS if not is_block_compact(x)] == ["BHLNC", "LHBNC"]
    with pytest.raises(ConfigError, match=r"'NDH'.*Did you mean 'NHD'"):
        canonical_layout("NDH")
    with pytest.raises(ConfigError, match=r"Did you mean 'FLASHINFER'\?"):
        find_backend("FLASHINFR")
    assert find_backend("FLASHMLA") is BACKENDS["FLASHMLA"]


@pytest.mark.parametrize(
    "changes",
    [
        {"axes": ("block", "token", "head")},
        {"axes": ("block", "token", "dim", "layer")},
        {"orders": {"LBNHC": ("layer", "block", "head", "token", "dim")}},
        {"orders": {"LBNHC": ("layer", "block", "token", "dim")}},
        {"orders": {"NHD": ("layer", "block", "token", "head", "dim")}},
    ],
    ids=str,
)
def test_backend_that_cannot_be_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="FLASH_ATTN_DIFFKV"):
        replace(BACKENDS["FLASH_ATTN_DIFFKV"], **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"orders": {}}, "has no orders.* at least one of LBNHC"),
        ({"axes": ("block", "token", "block", "dim")}, "each at most once"),
        ({"axes": ("blocks", "token", "dim")}, "block, token and dim among them"),
        (
            {"orders": {"LBHNC": ("layer", "block", "head", "token", "dim", "kv")}},
            "layout LBHNC: dim must come last in the order in memory",
        ),
        (
            {"orders": {"LBHNC": ("layer", "block", "head", "kv", "dim", "token")}},
            "dim must come last",
        ),
    ],
)
def test_a_refused_backend_says_what_to_change(
    changes: dict[str, object], words: str
) -> None:
    fields: dict[str, object] = {
        "name": "MINE",
        "axes": ("block", "head", "kv", "token", "dim"),
        "orders": {"LBHNC": ("layer", "block", "head", "kv", "token", "dim")},
        "row_elements": lambda spec: spec.head_size,
    }
    BackendLayout(**fields)
    with pytest.raises(ConfigError, match=f"backend MINE.*{words}"):
        BackendLayout(**fields | changes)


def test_unsupported_layout_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"CPU_ATTN .* BLNHC; it supports LBHNC"):
        BACKENDS["CPU_ATTN"].order("BLNHC")


def test_backend_travels_to_other_processes() -> None:
    backend = BACKENDS["FLASH_ATTN@0.32"]
    assert pickle.loads(pickle.dumps(backend)) == backend
    assert hash(replace(backend)) == hash(backend)


@pytest.mark.parametrize("name", sorted(BACKENDS))
@pytest.mark.parametrize("layers", [False, True])
def test_strides_are_those_of_a_dense_tensor_permuted(name: str, layers: bool) -> None:
    backend = BACKENDS[name]
    for layout in backend.orders:
        spec = spec_for(backend, 64, 2, "bfloat16")
        count = 3 if layers else 1
        plan = AttentionPlan(
            layer="x",
            spec=spec,
            backend=backend,
            layout=layout,
            num_blocks=5,
            block_size=64,
            num_layers=count,
        )
        # As engines do it: permute the shape, view, permute back.
        shape = (count,) * layers + backend.shape(spec, 5, 64)
        order = backend.stride_order(layout, layers=layers)
        dense = torch.empty([shape[axis] for axis in order])
        view = dense.permute([order.index(axis) for axis in range(len(shape))])
        if layers:
            view = view[1]
        made = attention_view(plan, 1 if layers else 0)
        itemsize = made.tensor.itemsize
        strides = tuple(stride // itemsize for stride in made.tensor.strides)
        assert (made.tensor.shape, strides) == (view.shape, view.stride())
        assert made.offset // itemsize == view.storage_offset()


def test_third_partys_backend_is_one_entry() -> None:
    def row(spec: FullAttentionSpec) -> int:
        return spec.head_size + spec.value_size

    theirs = BackendLayout(
        name="THEIRS",
        axes=("token", "head", "block", "dim"),
        orders={"LHBNC": ("layer", "head", "block", "token", "dim")},
        row_elements=row,
        row_holds_key_and_value=True,
        block_sizes=(MultipleOf(2), 5),
    )
    spec = attention(head_size_v=2)
    config = config_of([(spec, ["a"])], 4)
    tensors = allocate_kv_cache(config, {"a": theirs}, "LHBNC")
    cache = tensors.layers["a"]
    view = cache.tensors[0]
    assert view.shape == (4, 2, 4, 5)
    write(view[3, 1, 2], np.arange(1, 6), 0)
    at = kv_layout(cache).row(1, block=2, token=3, head=1)
    memory = memory_from(cache, tensors)
    assert memory[at : at + 4].view(np.int16).tolist() == [4, 5]


# -- vLLM's own classes ------------------------------------------------------------


def test_shapes_and_orders_are_those_of_vllm_019() -> None:
    ours, requests = [], []
    names = [name for name in BACKENDS if "@" not in name and "SM100" not in name]
    for name, alias, layers in itertools.product(names, ("NHD", "HND"), (False, True)):
        backend, layout = BACKENDS[name], canonical_layout(alias, layers=layers)
        requests.append((name, alias, layers, SIZES_019, 3))
        spec = attention(num_kv_heads=2, head_size=8, head_size_v=3)
        order = None
        if layout in backend.orders:
            order = backend.stride_order(layout, layers=layers)
        ours.append((backend.shape(spec, *SIZES_019[:2]), order))
    ignored = set()
    for request, mine, theirs in zip(requests, ours, ask(V019, requests), strict=True):
        shape, order = theirs
        assert mine[0] == shape, request
        identity = tuple(range(len(shape)))
        if mine[1] is not None:
            assert mine[1] == (identity if order is None else order), request
        else:
            ignored.add((request[0], *request[1:3], order))
    # What our table does not have is what these do not do: orders that ignore the
    # name (head-major CPU, token-major Triton), or leave layers apart (MLA).
    one = [entry for entry in ignored if entry[3] is not None]
    assert {(n, a, x) for n, a, x, _ in one} == {
        ("TRITON_ATTN", "HND", False),
        ("TRITON_ATTN", "HND", True),
        *(("TRITON_MLA", a, True) for a in ("NHD", "HND")),
        *(("FLASHMLA", a, True) for a in ("NHD", "HND")),
    }
    assert {o for n, _, _, o in one if n == "TRITON_ATTN"} == {
        (0, 1, 2, 3, 4),
        (1, 0, 2, 3, 4, 5),
    }
    assert {o[0] for n, _, _, o in one if "MLA" in n} == {0}


def test_views_are_those_of_vllm_032() -> None:
    kinds = [
        ("FLASH_ATTN@0.32", "FullAttentionSpec", {"num_kv_heads": 2, "head_size": 8}),
        (
            "FLASHINFER@0.32",
            "FullAttentionSpec",
            {"num_kv_heads": 3, "head_size": 8, "head_size_v": 4},
        ),
        (
            "TRITON_ATTN@0.32",
            "FullAttentionSpec",
            {"num_kv_heads": 1, "head_size": 8, "page_size_padded": 4096},
        ),
        ("CPU_ATTN@0.32", "FullAttentionSpec", {"num_kv_heads": 2, "head_size": 8}),
        ("FLASHMLA@0.32", "MLAAttentionSpec", {"num_kv_heads": 1, "head_size": 12}),
    ]
    requests, ours = [], []
    for (name, kind, sizes), layout in itertools.product(kinds, LAYOUTS):
        fields = {"block_size": 64, "dtype": "bfloat16", **sizes}
        backend = BACKENDS[name]
        padded = "page_size_padded" in sizes
        for kernel in (64, 32):
            # There, only layouts with layers apart are split into kernel blocks.
            splits = layout.startswith("LB") and not padded
            reads = reads_blocks_of(kernel, backend.block_sizes)
            known = layout in backend.orders and reads
            if not known or (kernel == 32 and not splits):
                continue
            requests.append((kind, fields, 5, 3, layout, kernel))
            make = MLAAttentionSpec if kind.startswith("MLA") else FullAttentionSpec
            plan = AttentionPlan(
                layer="x",
                spec=make(**fields),
                backend=backend,
                layout=layout,
                num_blocks=5,
                block_size=kernel,
                num_layers=3,
            )
            ours.append([attention_view(plan, i) for i in range(3)])
    for request, mine, theirs in zip(requests, ours, ask(V032, requests), strict=True):
        for view, (shape, strides, offset, dtype) in zip(mine, theirs, strict=True):
            itemsize = view.tensor.itemsize
            same = TensorLayout(shape, strides, itemsize, dtype, 0)
            assert (view.tensor, view.offset) == (same, offset), request
    assert len({(kind, layout) for kind, _, _, _, layout, _ in requests}) == 12
