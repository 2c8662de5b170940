"""SmolLM2 on stock vLLM: what comes out of host memory is what was computed."""

from pathlib import Path
from typing import Any

import pytest

from kvplugin.integration.demo.workload import Document, documents
from tests.engine import asking
from tests.engine.asking import BLOCK, assert_close, assert_same
from tests.engine.host import EngineHost, offload
from tests.engine.version import is_019

BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 2


BLOCKS = 5
"""Whole blocks of each prompt."""
HIT_NOISE = 0.25
"""Between a cold answer of SmolLM2 and any hit, a local one too: two steps of bf16 at
its logits near 20, on processors that have no bf16 of their own."""


@pytest.fixture(scope="module")
def engine(start_engine: Any, smollm2: Path) -> EngineHost:
    """Room for two of the three prompts; prefill in chunks of 256 tokens."""
    return start_engine(
        model=str(smollm2),
        kv_cache_memory_bytes=(2 * BLOCKS + 3) * BLOCK * BYTES_PER_TOKEN,
        max_model_len=(BLOCKS + 4) * BLOCK,
        max_num_batched_tokens=2 * BLOCK,
        kv_transfer_config=offload(cpu_bytes=1 << 29),
    )


@pytest.fixture(scope="module")
def texts(smollm2: Path) -> list[list[int]]:
    """Three prompts of `BLOCKS` blocks and a bit: a document and a question."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    def prompt(document: Document) -> list[int]:
        content = f"{document.text}\nQuestion: {document.questions[0]}"
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}],
            add_generation_prompt=True,
            tokenize=False,
        )
        return encode(chat)

    made = documents(3, 1, BLOCKS * BLOCK, lambda text: len(encode(text)))
    prompts = [prompt(document) for document in made]
    assert {len(p) // BLOCK for p in prompts} == {BLOCKS}
    return prompts


@pytest.fixture(autouse=True)
def nothing_leaks(engine: EngineHost) -> Any:
    yield
    assert not any(engine.run(asking.balance).values())
    # At once, with no step in between: the last answer's stores hold nothing.
    assert engine.run(asking.reset, True)


def test_a_loaded_prefix_answers_bit_for_bit_like_a_local_hit(engine, texts):
    cold = engine.run(asking.ask_one, texts[0])
    local = engine.run(asking.ask_one, texts[0])
    assert engine.run(asking.reset)
    loaded = engine.run(asking.ask_one, texts[0])

    assert (cold.cached_tokens, local.cached_tokens) == (0, BLOCKS * BLOCK)
    assert loaded.cached_tokens == BLOCKS * BLOCK
    assert_same(local, loaded)
    assert_close(cold, loaded)


def test_corrupted_host_memory_is_seen_in_the_answer(engine, texts):
    """The negative control: the comparison above can fail."""
    engine.run(asking.ask_one, texts[0])
    local = engine.run(asking.ask_one, texts[0])
    assert engine.run(asking.reset)
    assert engine.run(asking.corrupt_host_memory)
    loaded = engine.run(asking.ask_one, texts[0])

    assert loaded.cached_tokens == BLOCKS * BLOCK
    with pytest.raises(AssertionError):
        assert_same(local, loaded)
    with pytest.raises(AssertionError):
        assert_close(local, loaded)


def test_documents_that_evict_each_other_come_back_from_host_memory(engine, texts):
    before = engine.run(asking.metrics)
    first = [engine.run(asking.ask_one, text) for text in texts]
    second = [[engine.run(asking.ask_one, text) for _ in range(2)] for text in texts]
    after = engine.run(asking.metrics)

    for cold, (loaded, local) in zip(first, second, strict=True):
        assert cold.cached_tokens == 0
        assert loaded.cached_tokens == local.cached_tokens == BLOCKS * BLOCK
        assert_same(local, loaded)
        assert_close(cold, loaded, HIT_NOISE)

    def grown(name: str) -> float:
        return after[name] - before[name]

    loaded_tokens = grown("vllm:kvplugin_offload_loaded_tokens")
    if not is_019():  # whose `LLM` drops its own numbers of steps without an answer
        assert loaded_tokens == grown("vllm:external_prefix_cache_hits")
    assert 0 < loaded_tokens <= 3 * BLOCKS * BLOCK
    assert grown("vllm:kvplugin_offload_loaded_bytes") == (
        loaded_tokens * BYTES_PER_TOKEN
    )
    assert grown("vllm:kvplugin_offload_stored_bytes") == (
        3 * BLOCKS * BLOCK * BYTES_PER_TOKEN
    )
    assert grown("vllm:kvplugin_offload_load_seconds") > 0
    assert grown("vllm:kvplugin_offload_recompute_seconds_saved") > 0
    assert grown("vllm:kvplugin_offload_failed_loads") == 0


def test_a_second_prompt_hits_what_it_shares_and_no_more(engine, texts):
    shared = 3 * BLOCK + 40
    other = texts[0][:shared] + texts[1][:200]
    engine.run(asking.ask_one, texts[0])
    engine.run(asking.ask_one, other)
    local = engine.run(asking.ask_one, other)
    assert engine.run(asking.reset, True)
    engine.run(asking.ask_one, texts[0])
    assert engine.run(asking.reset)
    loaded = engine.run(asking.ask_one, other)

    assert loaded.cached_tokens == 3 * BLOCK
    assert_close(local, loaded)


def test_a_load_continues_where_the_local_hit_ends(engine, texts):
    engine.run(asking.ask_one, texts[0])
    local = engine.run(asking.ask_one, texts[0])
    assert engine.run(asking.reset)
    engine.run(asking.ask_one, texts[0][: 2 * BLOCK + 1])
    before = engine.run(asking.metrics)["vllm:kvplugin_offload_loaded_tokens"]
    loaded = engine.run(asking.ask_one, texts[0])
    after = engine.run(asking.metrics)["vllm:kvplugin_offload_loaded_tokens"]

    assert after - before == 3 * BLOCK
    assert_same(local, loaded)


def test_requests_that_arrive_together_load_their_prefix_once(engine, texts):
    prompts = [texts[0] + [100 + i] for i in range(4)]
    engine.run(asking.ask, prompts)
    local = engine.run(asking.ask, prompts)
    assert engine.run(asking.reset)
    before = engine.run(asking.metrics)["vllm:kvplugin_offload_loaded_tokens"]
    loaded = engine.run(asking.ask, prompts)
    after = engine.run(asking.metrics)["vllm:kvplugin_offload_loaded_tokens"]

    assert after - before == BLOCKS * BLOCK
    for one, other in zip(local, loaded, strict=True):
        assert other.cached_tokens == BLOCKS * BLOCK
        assert_close(one, other)


def test_a_plain_reset_keeps_host_memory_and_a_full_one_empties_it(engine, texts):
    engine.run(asking.ask_one, texts[0])
    assert engine.run(asking.reset)
    assert engine.run(asking.ask_one, texts[0]).cached_tokens == BLOCKS * BLOCK
    assert engine.run(asking.reset, True)
    assert engine.run(asking.ask_one, texts[0]).cached_tokens == 0
    assert (
        engine.run(asking.metrics)["vllm:kvplugin_offload_host_blocks_stored"] == BLOCKS
    )
