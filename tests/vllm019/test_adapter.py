"""What the adapter makes of vLLM 0.19.1's own objects."""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_interface import MambaSpec

from kvplugin.contract import GroupInfo, GroupKind
from kvplugin.integration.vllm.translate import kv_tensors
from kvplugin.integration.vllm.vllm019 import (
    LoadRoom,
    StepNotes,
    ends_uncounted,
    has_unnamed_drafter,
    step_notes,
    takes_states,
)
from kvplugin.layout import PageLayout, block_runs

BLOCKS = 5


def bytes_of(tensor, block: int, page_bytes: int) -> bytes:
    """What a copy of one block would read."""
    described = kv_tensors({"layer": tensor}, BLOCKS)["layer"]
    runs = block_runs(described.layout, PageLayout(page_bytes, BLOCKS))
    memory = torch.empty(0, dtype=torch.uint8)
    first = tensor if isinstance(tensor, torch.Tensor) else tensor[0]
    memory.set_(first.untyped_storage())
    begin = described.address - first.untyped_storage().data_ptr()
    return b"".join(
        bytes(memory[at : at + run.nbytes].tolist())
        for run in runs
        for at in [begin + run.offset + block * run.stride]
    )


def numbered(count: int, dtype: torch.dtype) -> torch.Tensor:
    raw = torch.arange(count, dtype=torch.int64).to(torch.uint8)
    return raw.view(dtype)


def test_keys_and_values_outermost_are_two_runs_of_a_block():
    cache = numbered(2 * BLOCKS * 16, torch.bfloat16).view(2, BLOCKS, 1, 2, 4)
    expected = [cache[half, 3].contiguous() for half in (0, 1)]
    assert bytes_of(cache, 3, 32) == b"".join(
        bytes(part.view(torch.uint8).flatten().tolist()) for part in expected
    )


def test_blocks_of_the_attention_kernel_are_put_together():
    cache = numbered(2 * BLOCKS * 32, torch.bfloat16).view(2, 2 * BLOCKS, 1, 2, 4)
    expected = [cache[half, 4:6].contiguous() for half in (0, 1)]
    assert bytes_of(cache, 2, 64) == b"".join(
        bytes(part.view(torch.uint8).flatten().tolist()) for part in expected
    )


def test_states_are_described_by_their_pages():
    """As `_reshape_kv_cache_tensors` makes them: views into pages that are padded."""
    spec = MambaSpec(
        block_size=16,
        shapes=((3, 2), (4,)),
        dtypes=(torch.bfloat16, torch.float32),
        page_size_padded=40,
        mamba_cache_mode="all",
    )
    raw = numbered(BLOCKS * spec.page_size_bytes, torch.uint8)
    states, offset = [], 0
    for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True):
        size = dtype.itemsize
        inner = torch.empty((BLOCKS, *shape)).stride()[1:]
        states.append(
            torch.as_strided(
                raw.view(dtype),
                (BLOCKS, *shape),
                (spec.page_size_bytes // size, *inner),
                offset // size,
            )
        )
        offset += torch.Size(shape).numel() * size
    assert bytes_of(states, 2, 40) == bytes(range(80, 120))


def request(num_tokens: int, computed: int) -> SimpleNamespace:
    return SimpleNamespace(num_tokens=num_tokens, num_computed_tokens=computed)


def scheduled(**counts: int) -> SimpleNamespace:
    return SimpleNamespace(num_scheduled_tokens=counts)


@pytest.mark.parametrize(
    ("pending", "live", "counts", "notes"),
    [
        (True, {}, {}, StepNotes(drains=True)),
        (False, {}, {}, StepNotes()),
        (True, {"a": request(20, 0)}, {"a": 8}, StepNotes()),
        (True, {"a": request(20, 12)}, {"a": 8}, StepNotes(tells=True)),
        (True, {"a": request(20, 0)}, {"b": 30}, StepNotes()),
    ],
    ids=["last", "idle", "a chunk", "an answer", "nobody of ours"],
)
def test_notes_of_a_step(pending, live, counts, notes):
    assert step_notes(pending, live, scheduled(**counts)) == notes


def states(every_block: bool) -> GroupInfo:
    return GroupInfo(0, GroupKind.MAMBA, 16, {}, state_every_block=every_block)


def test_states_are_served_only_where_a_hit_would_be_taken():
    assert takes_states(states(every_block=True))
    assert not takes_states(states(every_block=False))


@pytest.mark.parametrize("eagle", [True, False])
def test_a_drafter_whose_group_has_no_name_may_be_in_any(eagle):
    drafting = SimpleNamespace(use_eagle=lambda: eagle)
    config = SimpleNamespace(speculative_config=drafting)
    assert has_unnamed_drafter(config) is eagle
    assert not has_unnamed_drafter(SimpleNamespace(speculative_config=None))


class Waiter(SimpleNamespace):
    """A request that may wait for a load."""

    def __init__(self, name: str, num_tokens: int) -> None:
        super().__init__(request_id=name, num_tokens=num_tokens, num_cached_tokens=-1)


def test_loads_begin_as_long_as_all_that_wait_fit_with_their_prompts():
    room = LoadRoom(num_blocks=11, block_sizes=[4, 8])
    first, second = Waiter("a", 15), Waiter("b", 11)
    room.allocated(first, 4)  # 4 and 2 blocks, of 10
    assert room.admits(Waiter("c", 7)), "2 and 1 more"
    assert not room.admits(second), "3 and 2 more, with its first new token"


def test_one_alone_always_loads_and_who_runs_or_leaves_makes_room():
    room = LoadRoom(num_blocks=9, block_sizes=[4])
    first, second = Waiter("a", 100), Waiter("b", 3)
    assert room.admits(first)
    room.allocated(first, 4)
    assert room.admits(first), "asked again after its load failed"
    assert not room.admits(second)
    room.allocated(first, 0)
    assert room.admits(second)
    room.allocated(second, 4)
    assert not room.admits(first)
    room.leaves(second)
    assert room.admits(first)


def test_nobody_overtakes_one_that_has_been_refused():
    """Small loads that keep coming never leave a large one its room."""
    room = LoadRoom(num_blocks=11, block_sizes=[4])
    small, large, later = Waiter("a", 11), Waiter("b", 31), Waiter("c", 11)
    room.allocated(small, 4)  # 3 blocks of 10
    assert not room.admits(large), "8 more"
    assert not room.admits(later), "3 more would fit, but the large one is next"
    room.allocated(small, 0)
    assert not room.admits(later)
    assert room.admits(large)
    room.allocated(large, 4)
    room.allocated(large, 0)
    assert room.admits(later)


@pytest.mark.parametrize("how", ["it ends", "it runs without a load"])
def test_one_that_has_been_refused_and_leaves_holds_nobody_up(how):
    room = LoadRoom(num_blocks=11, block_sizes=[4])
    large, later = Waiter("b", 31), Waiter("c", 11)
    room.allocated(Waiter("a", 11), 4)
    assert not room.admits(large)
    if how == "it ends":
        room.leaves(large)
    else:
        room.allocated(large, 0)
    assert room.admits(later)


@pytest.mark.parametrize(("counted", "told"), [(-1, 0), (0, 0), (12, 12)])
def test_a_request_that_never_ran_has_no_cached_tokens(counted, told):
    waiter = Waiter("a", 9)
    waiter.num_cached_tokens = counted
    ends_uncounted(waiter)
    assert waiter.num_cached_tokens == told
