"""States: where they are kept, moved and given back, in each mode."""

import pytest

from kvplugin.managers import MambaManager
from tests.core.manager_setups import Setup, mamba
from tests.core.manager_steps import cache, compute


def shape(row: list[int]) -> str:
    return "".join(".x"[block > 0] for block in row)


def test_one_block_without_caching() -> None:
    setup = Setup((mamba("none", 64, drafts=2),), 10)
    kv = setup.manager(enable_caching=False)
    request = setup.request("a", range(60))
    assert compute(kv, request, budget=7)
    assert shape(kv.get_block_ids("a")[0]) == "xxx"
    kv.free(request)
    assert kv.usage == 0


def test_all_keeps_a_state_a_block_until_the_next_step() -> None:
    setup = Setup((mamba("all", drafts=1),), 20)
    kv = setup.manager()
    request = setup.request("a", range(40))
    assert compute(kv, request, upto=10)
    assert shape(kv.get_block_ids("a")[0]) == "xxxx"
    assert kv.allocate_slots(request, 6) is not None
    assert shape(kv.get_block_ids("a")[0]) == "..xxx"
    assert [
        kv.get_computed_blocks(setup.request("b", range(n)))[1] for n in (5, 9, 17)
    ] == [4, 8, 16]


@pytest.mark.parametrize("drafts", [0, 2])
def test_align_keeps_the_last_states_only(drafts: int) -> None:
    setup = Setup((mamba("align", drafts=drafts),), 12)
    kv = setup.manager()
    request = setup.request("a", range(30))
    assert compute(kv, request, upto=12)
    assert shape(kv.get_block_ids("a")[0]) == "..x" + "x" * drafts
    old = kv.get_block_ids("a")[0]
    new = kv.allocate_slots(request, 8)
    assert new is not None
    row = kv.get_block_ids("a")[0]
    assert row[2] == old[2]  # the step copies from it
    assert new.get_block_ids()[0] == row[len(old) :]
    request.num_computed_tokens = 20
    assert kv.allocate_slots(request, 8) is not None
    row = kv.get_block_ids("a")[0]
    assert row[:4] == [0] * 4
    assert kv.block_pool.num_used_blocks <= 2 + drafts
    kv.free(request)
    assert kv.usage == 0
    assert kv.get_computed_blocks(setup.request("b", range(30)))[1] == 28


def test_state_of_this_step_cannot_be_copied_yet() -> None:
    setup = Setup((mamba("all"),), 20)
    kv = setup.manager()
    assert compute(kv, setup.request("a", range(9)))
    request = setup.request("b", range(9))
    blocks, hit = kv.get_computed_blocks(request)
    assert hit == 8
    assert kv.allocate_slots(request, 1, hit, blocks) is None
    kv.new_step_starts()
    assert kv.allocate_slots(request, 1, hit, blocks) is not None


def test_checkpoints_are_the_only_states_to_hit() -> None:
    setup = Setup((mamba("all"),), 20)
    kv = setup.manager()
    (states,) = kv.coordinator.single_type_managers
    assert isinstance(states, MambaManager)
    states.set_checkpoints("a", [8, 13])
    cache(kv, setup.request("a", range(20)))
    assert kv.get_computed_blocks(setup.request("b", range(20)))[1] == 8
    cache(kv, setup.request("a", range(20)))  # the name is not bound to them for ever
    assert kv.get_computed_blocks(setup.request("b", range(20)))[1] == 16


def test_stale_states_get_no_key_from_a_step_that_passes_them() -> None:
    """A request that goes back in one long step leaves what it had behind."""
    setup = Setup((mamba("align"),), 12)
    kv = setup.manager()
    request = setup.request("a", range(20))
    assert compute(kv, request, upto=4)
    kv.evict_blocks(kv.get_block_ids("a")[0])
    request.num_computed_tokens = 0
    assert kv.allocate_slots(request, 16) is not None
    kv.new_step_starts()
    assert kv.get_computed_blocks(setup.request("b", range(16)))[1] == 0
    assert kv.get_computed_blocks(setup.request("b", range(17)))[1] == 16


def test_failed_attempts_leave_no_state_behind() -> None:
    setup = Setup((mamba("align", drafts=1),), 4)
    kv = setup.manager()
    assert compute(kv, setup.request("a", range(9)), upto=8)
    free = kv.block_pool.get_num_free_blocks()
    for i in range(100):
        request = setup.request(f"r{i}", range(9))
        blocks, hit = kv.get_computed_blocks(request)
        assert hit == 8
        assert kv.allocate_slots(request, 1, hit, blocks) is None
        kv.free(request)
    assert kv.block_pool.get_num_free_blocks() == free
    kv.check()
