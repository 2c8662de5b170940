"""Our events are vLLM's on the wire, whoever writes and whoever reads."""

from types import ModuleType
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplugin import events
from kvplugin.events import (
    MEDIUM_CPU,
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    external_hash,
)

FULL = BlockStored(
    block_hashes=[2**64 - 1, 1],
    parent_block_hash=3,
    token_ids=[4, 5, 6, 7],
    block_size=2,
    lora_id=8,
    medium=MEDIUM_GPU,
    lora_name="adapter",
    extra_keys=[("adapter", "salt"), None],
    group_idx=9,
    kv_cache_spec_kind="sliding_window",
    kv_cache_spec_sliding_window=128,
)
BARE = BlockStored(
    block_hashes=[],
    parent_block_hash=None,
    token_ids=[],
    block_size=16,
    lora_id=None,
    medium=None,
    lora_name=None,
)
EVENTS = [
    FULL,
    BARE,
    BlockRemoved([1, 2], MEDIUM_CPU, 3),
    BlockRemoved([1], None),
    AllBlocksCleared(),
]
NAMES = ["BlockStored", "BlockRemoved", "AllBlocksCleared"]


@pytest.fixture(scope="module")
def vllm_events() -> ModuleType:
    return pytest.importorskip("vllm.distributed.kv_events")


def any_event(module: ModuleType) -> Any:
    """The type "one of the events", as a reader of the wire asks for it."""
    return module.BlockStored | module.BlockRemoved | module.AllBlocksCleared


def fields(event: msgspec.Struct) -> dict[str, Any]:
    # Tuples come back as lists where their type is `Any`.
    return msgspec.to_builtins(msgspec.structs.asdict(event))


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_vllm_reads_every_field_of_ours(
    vllm_events: ModuleType, event: KVCacheEvent
) -> None:
    wire = msgspec.msgpack.encode(event)
    theirs = msgspec.msgpack.decode(wire, type=any_event(vllm_events))
    assert type(theirs).__name__ == type(event).__name__
    read = fields(theirs)
    ours = fields(event)
    assert {name: read.pop(name) for name in ours} == ours
    assert set(read.values()) <= {None}


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_we_read_every_field_of_vllm_that_we_know(
    vllm_events: ModuleType, event: KVCacheEvent
) -> None:
    theirs = getattr(vllm_events, type(event).__name__)(**msgspec.structs.asdict(event))
    wire = msgspec.msgpack.encode(theirs)
    assert msgspec.msgpack.decode(wire, type=any_event(events)) == event


def test_fields_of_vllm_that_we_do_not_know_are_no_error(
    vllm_events: ModuleType,
) -> None:
    theirs = vllm_events.BlockStored(
        **msgspec.structs.asdict(FULL),
        locality="LOCAL",
        ownership="tier",
        session_id="s",
    )
    wire = msgspec.msgpack.encode(theirs)
    assert msgspec.msgpack.decode(wire, type=any_event(events)) == FULL


def test_batch_of_vllm_carries_our_events(vllm_events: ModuleType) -> None:
    batch = vllm_events.KVEventBatch(ts=1.5, events=EVENTS)
    read = msgspec.msgpack.decode(
        msgspec.msgpack.encode(batch), type=vllm_events.KVEventBatch
    )
    assert [type(event).__name__ for event in read.events] == [
        type(event).__name__ for event in EVENTS
    ]


@pytest.mark.parametrize("name", NAMES)
def test_fields_have_the_names_order_and_defaults_of_vllm(
    vllm_events: ModuleType, name: str
) -> None:
    ours, theirs = (
        [(field.name, field.default) for field in msgspec.structs.fields(cls)]
        for cls in (getattr(events, name), getattr(vllm_events, name))
    )
    assert theirs[: len(ours)] == ours


def test_media_have_the_names_of_vllm(vllm_events: ModuleType) -> None:
    assert MEDIUM_GPU == vllm_events.MEDIUM_GPU
    assert MEDIUM_CPU == vllm_events.MEDIUM_CPU


def test_hash_outside_is_the_one_that_vllm_sends_by_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vllm = pytest.importorskip("vllm.v1.core.kv_cache_utils")
    monkeypatch.delenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", raising=False)

    @given(st.binary(min_size=1, max_size=64))
    def check(block_hash: bytes) -> None:
        assert external_hash(block_hash) == vllm.maybe_convert_block_hash(block_hash)

    check()
