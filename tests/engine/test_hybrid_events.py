"""What the outside hears of host memory: KV events, and where hits came from."""

from typing import Any

from kvplugin.events import MEDIUM_CPU, MEDIUM_GPU
from tests.engine import asking
from tests.engine.asking import BLOCK
from tests.engine.host import offload
from tests.engine.prompts import tokens

PROMPT = tokens("events", 3 * BLOCK + 9)


def record_events(llm: Any) -> None:
    """Keep what the engine publishes, as it is encoded."""
    import msgspec

    scheduler = asking.scheduler(llm)
    scheduler.published = []

    def publish(batch: Any) -> None:
        encoded = msgspec.msgpack.encode(batch)
        scheduler.published += msgspec.msgpack.decode(encoded, type=type(batch)).events

    scheduler.kv_event_publisher.publish = publish


def events(llm: Any) -> list[Any]:
    """Since the last call."""
    scheduler = asking.scheduler(llm)
    published, scheduler.published = scheduler.published, []
    return published


def hits_by_source(llm: Any) -> dict[str, float]:
    return {
        metric.labels["source"]: metric.value
        for metric in llm.get_metrics()
        if metric.name == "vllm:prompt_tokens_cached_by_source"
    }


def test_host_memory_says_what_it_holds_of_each_group(start_engine, gemma):
    engine = start_engine(
        model=str(gemma),
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=64 << 20,
        kv_events_config={"enable_kv_cache_events": True, "publisher": "null"},
        kv_transfer_config=offload(64 << 20),
    )
    engine.run(record_events)
    engine.run(asking.ask_one, PROMPT)
    engine.run(asking.ask_one, PROMPT)
    stored = [e for e in engine.run(events) if type(e).__name__ == "BlockStored"]
    ours = [event for event in stored if event.medium == MEDIUM_CPU]
    theirs = [event for event in stored if event.medium == MEDIUM_GPU]

    def described(found: list[Any]) -> dict[int, tuple[Any, Any]]:
        return {
            event.group_idx: (
                event.kv_cache_spec_kind,
                event.kv_cache_spec_sliding_window,
            )
            for event in found
        }

    assert len(described(ours)) == engine.run(asking.number_of_groups)
    assert described(ours) == described(theirs)
    full = {e.group_idx for e in stored if e.kv_cache_spec_kind == "full_attention"}
    names = [
        {block for e in found if e.group_idx in full for block in e.block_hashes}
        for found in (ours, theirs)
    ]
    assert len(names[0]) == 3
    assert names[0] == names[1], "a block has one name in both media"

    assert engine.run(asking.reset)
    engine.run(asking.ask_one, PROMPT)
    assert engine.run(hits_by_source)["host"] == 3 * BLOCK
    assert engine.run(asking.reset, True)
    engine.run(asking.ask_one, tokens("another", 9))
    removed = [
        event
        for event in engine.run(events)
        if type(event).__name__ == "BlockRemoved" and event.medium == MEDIUM_CPU
    ]
    assert len(removed) == sum(len(event.block_hashes) for event in ours)
