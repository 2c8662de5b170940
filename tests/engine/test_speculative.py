"""Speculative decoding: vLLM then ends a step only after it has asked what ended."""

from tests.engine import asking
from tests.engine.asking import BLOCK, assert_same
from tests.engine.host import offload
from tests.engine.prompts import tokens


def test_stores_end_and_hits_come_back_with_drafts(start_tiny):
    engine = start_tiny(
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 3,
        },
        kv_transfer_config=offload(64 << 20, offload_prompt_only=False),
    )
    prompt = tokens("drafts", 40) * 8
    engine.run(asking.ask_one, prompt, 2 * BLOCK)
    local = engine.run(asking.ask_one, prompt, 2 * BLOCK)
    assert not any(engine.run(asking.balance).values())
    assert engine.run(asking.reset)
    loaded = engine.run(asking.ask_one, prompt, 2 * BLOCK)

    assert loaded.cached_tokens == local.cached_tokens == 2 * BLOCK
    assert_same(local, loaded)
    assert not any(engine.run(asking.balance).values())
    assert engine.run(asking.metrics)["vllm:kvplugin_offload_failed_stores"] == 0
    assert engine.run(asking.reset, True)
