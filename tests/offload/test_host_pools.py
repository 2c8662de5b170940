"""How host memory is shared out among groups, and that the shares stay apart."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplugin.connectors.offload import capacity
from kvplugin.connectors.offload.capacity import host_pools
from kvplugin.connectors.offload.config import OffloadConfig
from kvplugin.connectors.offload.memory import check_machine_memory
from kvplugin.connectors.offload.messages import HostPool
from kvplugin.contract import EngineInfo, GroupKind, Lookup
from kvplugin.errors import CapacityError, ConfigError
from kvplugin.events import BlockRemoved, BlockStored
from tests.offload.half import Half, engine, group, request
from tests.offload.setup_model import prompt

FULL, WINDOW, STATE = GroupKind.FULL, GroupKind.SLIDING_WINDOW, GroupKind.MAMBA


def pools(info: EngineInfo, nbytes: int, blocks_per_chunk: int = 1) -> list[HostPool]:
    config = OffloadConfig(cpu_bytes_to_use=nbytes, blocks_per_chunk=blocks_per_chunk)
    return host_pools(info, config)


def test_groups_of_equal_blocks_share_a_pool() -> None:
    info = engine(group(WINDOW, 0, window=8), group(FULL, 1), max_model_len=40)
    assert pools(info, 640) == [HostPool([0, 1], 10)]


def test_pools_get_what_one_long_request_fills_of_each() -> None:
    info = engine(
        group(FULL, 0, page=32),
        group(STATE, 1, page=320),
        max_model_len=400,
        max_step_tokens=100,
    )
    # 100 blocks of 32 bytes and 4 states of 320 are 4480 bytes.
    assert pools(info, 4480) == [HostPool([0], 100), HostPool([1], 4)]
    assert pools(info, 44800) == [HostPool([0], 1000), HostPool([1], 40)]


def test_a_state_a_block_needs_as_many_slots_as_blocks() -> None:
    info = engine(
        group(FULL, 0, page=32),
        group(STATE, 1, page=320, state_every_block=True),
        max_model_len=400,
        max_step_tokens=100,
    )
    assert pools(info, 35200) == [HostPool([0], 100), HostPool([1], 100)]


@pytest.mark.parametrize("step", [0, 1, 1000])
def test_there_is_room_for_a_state_whatever_a_step_computes(step: int) -> None:
    info = engine(group(STATE), max_model_len=400, max_step_tokens=step)
    assert pools(info, 64) == [HostPool([0], 1)]


def test_only_dense_groups_are_kept_in_chunks() -> None:
    info = engine(group(FULL, 0), group(WINDOW, 1, window=8), max_model_len=48)
    # 12 blocks of each, those of the first in 4 chunks.
    assert pools(info, 24 * 64, 3) == [HostPool([0], 12), HostPool([1], 12)]


def test_ranks_share_the_memory() -> None:
    info = engine(group(FULL), world_size=4)
    assert pools(info, 64 * 4 * 7 + 255) == [HostPool([0], 7)]


def test_without_a_greatest_length_it_is_that_of_the_pool() -> None:
    info = engine(group(FULL, 0, size=4, page=32), group(FULL, 1, size=8, page=128))
    # 1600 tokens: 400 blocks of 32 and 200 of 128 bytes.
    assert pools(info, 38400) == [HostPool([0], 400), HostPool([1], 200)]


def test_memory_that_holds_nothing_of_one_pool_is_refused_by_name() -> None:
    info = engine(
        group(FULL, 0, page=32),
        group(STATE, 1, page=320),
        max_model_len=400,
        max_step_tokens=400,
    )
    with pytest.raises(CapacityError) as refusal:
        pools(info, 3519)
    assert "cpu_bytes_to_use=3519 holds no chunk of group 1 (mamba)" in str(
        refusal.value
    )
    assert "3520 bytes in all" in str(refusal.value)
    assert pools(info, 3520) == [HostPool([0], 100), HostPool([1], 1)]


def test_more_than_the_machine_has_is_refused() -> None:
    with pytest.raises(CapacityError, match="lower cpu_bytes_to_use"):
        pools(engine(group(FULL)), 1 << 59)


def test_a_rank_needs_its_own_share_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(capacity, "check_machine_memory", asked.append)
    pools(engine(group(FULL), world_size=4), 64 * 4 * 10)
    assert asked == [640]
    check_machine_memory(asked[0])


def test_a_kind_that_is_not_served_has_no_pool() -> None:
    with pytest.raises(ConfigError, match="cross_attention"):
        pools(engine(group(GroupKind.CROSS_ATTENTION)), 1 << 20)


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 500)), min_size=1),
    blocks=st.integers(1, 5),
    ranks=st.integers(1, 4),
    longest=st.integers(0, 5000),
    nbytes=st.integers(1, 10**7),
)
def test_never_more_than_was_given_and_never_nothing(
    sizes: list[tuple[int, int]], blocks: int, ranks: int, longest: int, nbytes: int
) -> None:
    groups = [
        group(FULL, index, size=4 * size, page=page)
        for index, (size, page) in enumerate(sizes)
    ]
    info = engine(*groups, world_size=ranks, max_model_len=longest)
    try:
        made = pools(info, nbytes, blocks)
    except CapacityError:
        return
    assert sorted(i for pool in made for i in pool.groups) == list(range(len(groups)))
    assert all(p.host_blocks and p.host_blocks % blocks == 0 for p in made)
    used = sum(p.host_blocks * groups[p.groups[0]].block_bytes * ranks for p in made)
    assert used <= nbytes


class TestApart:
    """Two groups whose blocks differ in size: two pools with ids of their own."""

    info = engine(
        group(FULL, 0, page=32), group(WINDOW, 1, page=128, window=8), max_model_len=64
    )

    def test_each_pool_evicts_its_own(self) -> None:
        # 16 blocks of each.
        half = Half(self.info, cpu_bytes_to_use=16 * 160)
        assert [pool.host_blocks for pool in half.scheduler.host_pools] == [16, 16]
        for seed in range(2):
            view = request(prompt(48, seed), name=f"r{seed}")
            half.admit(view, range(1, 13), range(21, 33))
            stored = half.store(view, 0, 48)
            assert {g: len(ids) for g, ids in stored.items()} == {0: 12, 1: 12}
        assert half.stat("evicted_blocks") == 16
        assert half.offered(prompt(48, 1)) == Lookup(48)
        assert 0 < half.offered(prompt(48, 0)).tokens <= 16, "its head has stayed"

    def test_events_name_group_kind_window_and_medium(self) -> None:
        half = Half(self.info, cpu_bytes_to_use=16 * 160)
        view = request(prompt(8))
        half.admit(view, (1, 2), (3, 4))
        half.store(view, 0, 8)
        events = half.scheduler.take_events()
        stored = [
            (e.group_idx, e.kv_cache_spec_kind, e.kv_cache_spec_sliding_window)
            for e in events
            if isinstance(e, BlockStored)
        ]
        assert (
            stored == [(0, "full_attention", None)] * 2 + [(1, "sliding_window", 8)] * 2
        )
        half.scheduler.reset()
        lost = half.scheduler.take_events()
        assert [e.group_idx for e in lost if isinstance(e, BlockRemoved)] == [
            0,
            0,
            1,
            1,
        ]
        assert {getattr(e, "medium", None) for e in [*events, *lost]} == {"CPU"}
        removed = {
            h for e in lost if isinstance(e, BlockRemoved) for h in e.block_hashes
        }
        added = {
            h for e in events if isinstance(e, BlockStored) for h in e.block_hashes
        }
        assert removed == added
