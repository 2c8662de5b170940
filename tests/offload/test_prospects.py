"""Settings that can never give a hit are said at the start."""

import logging
from dataclasses import replace

import pytest

from kvplugin.connectors.offload.capacity import host_pools
from kvplugin.connectors.offload.config import OffloadConfig
from kvplugin.connectors.offload.prospects import hopeless
from kvplugin.connectors.offload.scheduler import OffloadScheduler
from kvplugin.contract import EngineInfo, GroupInfo, GroupKind
from kvplugin.layout import PageLayout

PAGE = 64


def engine(*windows: int, max_model_len: int = 1024) -> EngineInfo:
    """One full group and a group for each window; blocks of 16 tokens."""
    kinds = [(GroupKind.FULL, 0), *((GroupKind.SLIDING_WINDOW, w) for w in windows)]
    return EngineInfo(
        engine_id="e",
        groups=tuple(
            GroupInfo(i, kind, 16, {f"l{i}": PageLayout(PAGE, 100)}, window=window)
            for i, (kind, window) in enumerate(kinds)
        ),
        num_blocks=100,
        hash_block_size=16,
        max_model_len=max_model_len,
    )


def reasons(info: EngineInfo, **settings: object) -> list[str]:
    config = OffloadConfig(**{"cpu_bytes_to_use": 100 * PAGE, **settings})
    return hopeless(info, config, host_pools(info, config))


def test_what_can_give_hits_is_not_blamed():
    assert not reasons(engine())
    assert not reasons(engine(32, 64))
    assert not reasons(engine(max_model_len=17))
    assert not reasons(replace(engine(), max_model_len=0), blocks_per_chunk=9)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"blocks_per_chunk": 65, "cpu_bytes_to_use": 1 << 20}, "blocks_per_chunk"),
        ({"min_load_tokens": 1024}, "min_load_tokens"),
        ({"cpu_bytes_to_use": 2 * PAGE}, "cpu_bytes_to_use"),
    ],
)
def test_the_setting_is_named(settings, name):
    (why,) = reasons(engine(32, 64), **settings)
    assert name in why


def test_a_request_of_one_block_leaves_nothing_to_load():
    (why,) = reasons(engine(max_model_len=16))
    assert "max_model_len" in why


def test_three_groups_need_three_slots_for_one_block():
    assert reasons(engine(32, 64), cpu_bytes_to_use=2 * PAGE)
    assert not reasons(engine(32, 64), cpu_bytes_to_use=3 * PAGE)


def test_it_is_logged_once_at_the_start(caplog):
    with caplog.at_level(logging.WARNING, "vllm.kvplugin"):
        OffloadScheduler(
            engine(32), OffloadConfig(cpu_bytes_to_use=10_000, min_load_tokens=4096)
        )
    (record,) = caplog.records
    assert "min_load_tokens" in record.getMessage()
