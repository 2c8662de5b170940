"""Faults of the field that come from what bytes mean (scenarios 15, 26, 28 and 29)."""

import itertools

import numpy as np
import pytest
import torch

from kvplugin.errors import LayoutMismatchError
from kvplugin.kernels.host import BlockCopier
from kvplugin.kernels.host_convert import BlockConverter
from kvplugin.kernels.host_zero import BlockZeroer
from kvplugin.layout import TensorLayout, head_slices, plan_conversion
from kvplugin.spec import MambaSpec, SlidingWindowSpec
from kvplugin.worker.backends import BackendLayout
from kvplugin.worker.describe import (
    describe_cache,
    describe_tensor,
    kv_layout,
    recognise,
    regions,
)
from kvplugin.worker.tensors import KVTensors, allocate_kv_cache
from kvplugin.worker.zeroing import BlockZeroing
from tests.worker_tensors.cases import (
    any_block_size,
    attention,
    codes,
    config_of,
    convert,
    logical,
    memory_from,
    one_layer,
    read,
    write,
)
from tests.worker_tensors.shared import hybrid_keys_first

FLASH, FLASHINFER = any_block_size("FLASH_ATTN"), any_block_size("FLASHINFER")
LAYOUT_PAIRS = list(itertools.product(("LBNHC", "LBHNC"), repeat=2))


# -- 15: bytes of another dtype ----------------------------------------------------


def hybrid_pool() -> KVTensors:
    """Attention in bf16 and states in fp32, in one buffer of ten blocks."""
    full = attention(block_size=16, num_kv_heads=1, head_size=4)
    states = MambaSpec(
        block_size=64,
        shapes=((16, 4),),
        dtypes=("float32",),
        page_size_padded=full.page_size_bytes,
    )
    config = config_of([(full, ["attention"]), (states, ["recurrent"])], 10)
    assert config.needs_kv_cache_zeroing
    return allocate_kv_cache(config, {"attention": FLASHINFER}, "NHD")


def attend(tensors: KVTensors, block: int) -> torch.Tensor:
    """Write 5 of 16 slots, weigh the others by zero."""
    cache = tensors.layers["attention"].tensors[0]
    cache[block, :, :5] = 1.0
    weights = torch.zeros(16, dtype=torch.bfloat16)
    weights[:5] = 0.2
    return weights @ cache[block, 1, :, 0]


@pytest.mark.parametrize("zeroing", [True, False])
@pytest.mark.parametrize("bits", [0x3F80_7FC1, 0x7FC0_0000], ids=["finite", "nan"])
def test_masked_slots_do_not_show_what_states_left(zeroing: bool, bits: int) -> None:
    tensors = hybrid_pool()
    # A NaN in fp32, or a number whose lower half is a NaN in bf16.
    state = tensors.layers["recurrent"].tensors[0]
    state[3] = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    zero = BlockZeroing(tensors, BlockZeroer)
    if zeroing:
        zero.zero([3])
    # Without, the scenario is the one that was reported: this is the control.
    assert bool(attend(tensors, 3).isfinite().all()) == zeroing


@pytest.mark.parametrize("zeroing", [True, False])
def test_state_does_not_go_on_from_an_old_request(zeroing: bool) -> None:
    tensors = hybrid_pool()
    zero = BlockZeroing(tensors, BlockZeroer)
    state = tensors.layers["recurrent"].tensors[0]

    def run(block: int) -> torch.Tensor:
        if zeroing:
            zero.zero([block])
        for token in range(6):
            state[block] = 0.5 * state[block] + token
        return state[block].clone()

    first = run(4)
    assert torch.equal(run(4), first) == zeroing


# -- 26: head order ----------------------------------------------------------------


@pytest.mark.parametrize(("produced", "consumed"), LAYOUT_PAIRS)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("tokens", "heads"), [(4, 6), (4, 4), (8, 8)])
@pytest.mark.parametrize("backend", [FLASH, FLASHINFER], ids=lambda b: b.name)
@pytest.mark.parametrize("engine", [True, False], ids=["engine", "runs"])
def test_heads_arrive_as_heads(
    produced: str,
    consumed: str,
    ranks: int,
    tokens: int,
    heads: int,
    backend: BackendLayout,
    engine: bool,
) -> None:
    # Decode has twice the ranks of prefill, each with half of its heads.
    spec = attention(block_size=tokens, num_kv_heads=heads, dtype="int32")
    producer = one_layer(backend, produced, spec, 4)
    source = producer.layers["x"]
    # 1000 * token + 10 * head + element, and keys other than values.
    token, head, dim = np.ogrid[: 3 * tokens, :heads, :3]
    value = 1000 * token + 10 * head + dim
    blocks = [3, 0, 2]
    for sign, view in zip((1, -1), logical(source).values(), strict=True):
        for i, block in enumerate(blocks):
            write(view[block], sign * value[i * tokens : (i + 1) * tokens], 0)
    for rank in range(ranks):
        mine = attention(block_size=tokens, num_kv_heads=heads // ranks, dtype="int32")
        consumer = one_layer(backend, consumed, mine, 5)
        target = consumer.layers["x"]
        for part in head_slices(heads, 1, ranks, rank):
            plan = plan_conversion(kv_layout(source), kv_layout(target), part.heads)
            ids = plan.pair_chunks(blocks, [1, 4, 2])
            if engine:
                addresses = (
                    source.tensors[0].data_ptr(),
                    target.tensors[0].data_ptr(),
                )
                BlockConverter(plan, *addresses).convert(*ids)
            else:
                convert(
                    plan,
                    memory_from(source, producer),
                    memory_from(target, consumer),
                    blocks,
                    [1, 4, 2],
                )
        first = rank * heads // ranks
        wanted = value[:, first : first + heads // ranks]
        for sign, view in zip((1, -1), logical(target).values(), strict=True):
            got = read(view[[1, 4, 2]]).reshape(3 * tokens, heads // ranks, 3)
            assert np.array_equal(got, sign * wanted)
            assert not view[[0, 3]].any()


@pytest.mark.parametrize(("tokens", "heads"), [(4, 6), (4, 4)])
def test_copy_of_bytes_between_orders_is_wrong_where_nothing_shows(
    tokens: int, heads: int
) -> None:
    # The control: as many heads as tokens, and the very bytes of a block fit.
    spec = attention(block_size=tokens, num_kv_heads=heads, dtype="int32")
    nhd, hnd = (one_layer(FLASHINFER, x, spec, 2) for x in ("LBNHC", "LBHNC"))
    source, target = (tensors.layers["x"] for tensors in (nhd, hnd))
    for view in logical(source).values():
        write(view, codes(view.shape), 0)
    BlockCopier(regions(source), regions(target)).copy([0], [1])
    assert not torch.equal(
        logical(source)["k"][0].contiguous(), logical(target)["k"][1].contiguous()
    )


# -- 28: every group ---------------------------------------------------------------


@pytest.mark.parametrize(("produced", "consumed"), LAYOUT_PAIRS)
def test_blocks_of_every_group_are_converted(produced: str, consumed: str) -> None:
    full = attention(dtype="int32")
    window = SlidingWindowSpec(
        block_size=4, num_kv_heads=2, head_size=3, dtype="int32", sliding_window=8
    )
    config = config_of([(full, ["full.0", "full.1"]), (window, ["sw.0"])], 6)
    names = ("full.0", "full.1", "sw.0")
    here, there = (
        allocate_kv_cache(config, dict.fromkeys(names, FLASH), layout)
        for layout in (produced, consumed)
    )
    rows = {0: ([5, 1], [2, 3]), 1: ([4], [1])}
    for number, name in enumerate(names):
        cache = here.layers[name]
        for kv, view in enumerate(logical(cache).values()):
            for block in rows[cache.group][0]:
                canary = 1_000_000 * number + 100_000 * kv + 1_000 * block
                write(view[block], codes(view.shape[1:], canary), 0)
    for name in names:
        source, target = here.layers[name], there.layers[name]
        plan = plan_conversion(kv_layout(source), kv_layout(target))
        ids = plan.pair_chunks(*rows[source.group])
        converter = BlockConverter(
            plan, source.tensors[0].data_ptr(), target.tensors[0].data_ptr()
        )
        converter.convert(*ids)
    for name in names:
        source, target = here.layers[name], there.layers[name]
        for part, view in logical(source).items():
            for a, b in zip(*rows[source.group], strict=True):
                assert torch.equal(view[a], logical(target)[part][b])


# -- 29: a layout that nobody knows ------------------------------------------------


def changed_engine() -> torch.Tensor:
    """Blocks of [heads, tokens, key and value], where [2, tokens, heads, element] is
    expected: as many bytes."""
    return torch.zeros(10, 2, 4, 6, dtype=torch.bfloat16)


def test_unknown_layout_is_refused_at_registration_with_both_descriptors() -> None:
    plan = one_layer(FLASHINFER, "LBNHC", attention(), 10).layers["x"].plan
    known = describe_cache(one_layer(FLASHINFER, "LBNHC", attention(), 10).layers["x"])
    theirs = describe_tensor(changed_engine(), 0)
    with pytest.raises(LayoutMismatchError) as raised:
        recognise(theirs, plan)
    message = str(raised.value)
    for part in (repr(theirs), repr(known.layout), "FLASHINFER", "'x'"):
        assert part in message


@pytest.mark.parametrize(
    "strides",
    [(64, 24, 6, 3, 1), (48, 24, 3, 6, 1), (48, 24, 6, 3, 2), (24, 240, 6, 3, 1)],
)
def test_strides_that_no_layout_has_are_refused(strides: tuple[int, ...]) -> None:
    plan = one_layer(FLASHINFER, "LBNHC", attention(), 10).layers["x"].plan
    bytes_of = tuple(2 * stride for stride in strides)
    theirs = TensorLayout((10, 2, 4, 2, 3), bytes_of, 2, "bfloat16", 0)
    with pytest.raises(LayoutMismatchError, match=r"LBNHC: Tensor.*LBHNC: Tensor"):
        recognise(theirs, plan)


def test_what_is_registered_is_recognised() -> None:
    for backend in (FLASH, FLASHINFER, any_block_size("FLASH_ATTN@0.32")):
        for layout in ("LBNHC", "LBHNC"):
            cache = one_layer(backend, layout, attention(), 10).layers["x"]
            theirs = describe_tensor(cache.tensors[0], backend.axes.index("block"))
            assert theirs == cache.views[0].tensor
            guess = one_layer(backend, "LBNHC", attention(), 10).layers["x"].plan
            assert recognise(theirs, guess) == cache.plan


def test_keys_first_viewed_block_by_block_is_recognised() -> None:
    tensors = hybrid_keys_first()
    cache = tensors.layers["a"]
    guess = one_layer(FLASH, "LBHNC", attention(), 3).layers["x"].plan
    found = recognise(describe_tensor(cache.tensors[0], 1), guess)
    assert (found.layout, found.block_major) == ("LBNHC", True)


def test_store_clear_and_restore_is_the_same_bytes() -> None:
    tensors = hybrid_keys_first()
    for name in ("a", "m"):
        cache = tensors.layers[name]
        (buffer,) = tensors.buffers
        buffer.copy_(torch.arange(buffer.nbytes).to(torch.int8))
        before = buffer.clone()
        runs = regions(cache)
        nbytes = sum(run.nbytes for run in runs)
        assert nbytes == cache.spec.real_page_size_bytes
        tier = np.zeros((3, nbytes), np.uint8)
        slots, offset = [], 0
        for run in runs:
            address = tier.ctypes.data + offset
            slots.append(type(run)(address, nbytes, run.nbytes, 3))
            offset += run.nbytes
        BlockCopier(runs, slots).copy([1, 2], [0, 2])
        for tensor in cache.tensors:
            tensor.narrow(0 if name == "m" else 1, 1, 2).zero_()
        assert not torch.equal(buffer, before)
        BlockCopier(slots, runs).copy([0, 2], [1, 2])
        assert torch.equal(buffer, before)
