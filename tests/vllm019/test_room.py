"""Loads that together take all blocks: each request waits for what the others hold.

vLLM 0.19 admits a load if its whole prompt fits what is free at that moment, and
forgets what earlier loads still need; requests that wait are never preempted. 0.32
counts it.
"""

from typing import Any

from tests.engine import asking
from tests.engine.asking import BLOCK, Answer, answer_of, assert_close, scheduler
from tests.engine.host import offload
from tests.engine.prompts import tokens

BLOCKS = 10
"""That the pool can hand out."""


def ask_stepping(llm: Any, prompts: list[list[int]], steps: int) -> list[Answer | str]:
    """Answers of prompts that arrive together, or what became of them in so many
    steps."""
    from vllm import SamplingParams

    engine, answers = llm.llm_engine, dict[str, Answer]()
    greedy = SamplingParams(temperature=0, max_tokens=4, logprobs=5, detokenize=False)
    for i, prompt in enumerate(prompts):
        engine.add_request(f"{i}", {"prompt_token_ids": prompt}, greedy)
    for _ in range(steps):
        for output in engine.step():
            if output.finished:
                answers[output.request_id] = answer_of(output)
        if len(answers) == len(prompts):
            break
    waiting = {r.request_id: r.status.name for r in scheduler(llm).requests.values()}
    engine.abort_request([f"{i}" for i in range(len(prompts))])
    return [answers.get(f"{i}", f"waits: {waiting}") for i in range(len(prompts))]


def test_loads_leave_each_other_room(start_tiny):
    engine = start_tiny(
        kv_cache_memory_bytes=(BLOCKS + 1) * BLOCK * 2048,
        max_model_len=8 * BLOCK,
        kv_transfer_config=offload(64 << 20),
    )
    prompts = [
        tokens(f"room {i}", blocks * BLOCK + 64) for i, blocks in enumerate((5, 5, 3))
    ]
    cold = [engine.run(asking.ask_one, prompt) for prompt in prompts]
    assert engine.run(asking.reset, True)
    for prompt in prompts:
        engine.run(asking.ask_one, prompt[: 3 * BLOCK + 1])
    assert engine.run(asking.reset)
    together = engine.run(ask_stepping, prompts, 2000)

    assert [type(answer) for answer in together] == [Answer] * 3, together
    for one, other in zip(cold, together, strict=True):
        assert other.cached_tokens == 3 * BLOCK
        assert_close(one, other)
    assert not any(engine.run(asking.balance).values())
    assert engine.run(asking.reset, True)
