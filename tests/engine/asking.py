"""What the tests ask an engine, and what they read from its inside.

Every function takes the `LLM` first and runs in the engine's process.
"""

import time
from dataclasses import dataclass
from typing import Any

from kvplugin.integration.vllm.connector import VllmConnector, _local_workers

BLOCK = 128
"""Tokens of a block: vLLM's default on a CPU."""


@dataclass(frozen=True)
class Answer:
    """Greedy tokens with the log-probabilities of the best candidates at each."""

    tokens: tuple[int, ...]
    candidates: tuple[dict[int, float], ...]
    cached_tokens: int
    finish_reason: str


def greedy(max_tokens: int) -> Any:
    """Sampling parameters of every question here."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0.0, max_tokens=max_tokens, logprobs=5, detokenize=False
    )


def ask(llm: Any, prompts: list[list[int]], max_tokens: int = 4) -> list[Answer]:
    """Greedy answers to prompts given as token ids, all in one batch."""
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        greedy(max_tokens),
        use_tqdm=False,
    )
    return [answer_of(output) for output in outputs]


def answer_of(output: Any) -> Answer:
    """What a `RequestOutput` with log-probabilities says."""
    (completion,) = output.outputs
    return Answer(
        tokens=tuple(completion.token_ids),
        candidates=tuple(
            {token: entry.logprob for token, entry in position.items()}
            for position in completion.logprobs or ()
        ),
        cached_tokens=output.num_cached_tokens or 0,
        finish_reason=str(completion.finish_reason),
    )


def ask_one(llm: Any, prompt: list[int], max_tokens: int = 4) -> Answer:
    """The answer to one prompt alone in its batch."""
    return ask(llm, [prompt], max_tokens)[0]


def reset(llm: Any, connector: bool = False) -> bool:
    """Empty the local prefix cache, and with `connector` host memory too."""
    return bool(llm.reset_prefix_cache(reset_connector=connector))


def metrics(llm: Any) -> dict[str, float]:
    """vLLM's metrics by name; of histograms the sum."""
    return {
        metric.name: getattr(metric, "value", getattr(metric, "sum", 0.0))
        for metric in llm.get_metrics()
    }


def scheduler(llm: Any) -> Any:
    """vLLM's scheduler (engine in one process)."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def balance(llm: Any) -> dict[str, int]:
    """What is still held after the last answer; every number should be 0.

    Runs the connector's own integrity check as well.
    """
    (balance,) = balances(llm)
    return balance


def balances(llm: Any) -> list[dict[str, int]]:
    """`balance` of each connector of ours, where there are several connectors."""
    connector = scheduler(llm).connector
    ours = [
        one
        for one in getattr(connector, "sub_connectors", [connector])
        if isinstance(one, VllmConnector)
    ]
    pool = scheduler(llm).kv_cache_manager.block_pool
    used = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
    return [{"engine blocks": used} | _held_by(one._scheduler) for one in ours]


def _held_by(half: Any) -> dict[str, int]:
    half.check()
    return {
        "host slots": sum(
            pool.num_usable_blocks - pool.get_num_free_blocks()
            for pool in half._tier._pools
        ),
        "jobs": len(half._jobs),
        "requests": len(half._requests),
        "watched": len(half.watched),
    }


def preemptions(llm: Any) -> float:
    """Requests preempted so far."""
    return metrics(llm)["vllm:num_preemptions"]


def corrupt_host_memory(llm: Any) -> int:
    """Flip bits of everything in host memory; returns the bytes changed. Again: as it
    was."""
    import numpy as np

    del llm
    (worker,) = _local_workers.values()
    views = [
        np.frombuffer(memory.view, dtype=np.uint8)
        for memory, _ in worker._copies._memory.memories
    ]
    for view in views:
        view ^= 0x15
    return sum(view.size for view in views)


def corrupt_group(llm: Any, group: int) -> int:
    """Flip bits of all that host memory holds of one group; returns the bytes changed.
    Again: as it was."""
    import ctypes

    import numpy as np

    (worker,) = _local_workers.values()
    tier = scheduler(llm).connector._scheduler._tier
    cut, slots = tier._cuts[group], tier._pool_of[group].cached_blocks(group).values()
    changed = 0
    for slot in slots:
        for block in range(cut.blocks):
            for region in worker._copies._memory.regions[group]:
                start = region.address + cut.host_block(slot, block) * region.stride
                run = (ctypes.c_uint8 * region.nbytes).from_address(start)
                view = np.frombuffer(run, dtype=np.uint8)
                view ^= 0x15
                changed += region.nbytes
    return changed


def assert_same(first: Answer, second: Answer) -> None:
    """Bit-equal: the same tokens and log-probabilities."""
    assert first.tokens == second.tokens
    assert first.candidates == second.candidates


def assert_close(first: Answer, second: Answer, tolerance: float = 0.1) -> None:
    """Equal as far as bf16 allows when a prefill is split differently.

    The chosen token's log-probability agrees within `tolerance` as long as the tokens
    do, and tokens may part only where the two best are closer than that. (Unlikely
    candidates are not compared: logits near 20 are 0.125 apart in bf16.)
    """
    for ours, theirs, token, other in zip(
        first.candidates, second.candidates, first.tokens, second.tokens, strict=True
    ):
        if token != other:
            best, runner_up = sorted(ours.values(), reverse=True)[:2]
            assert best - runner_up < tolerance
            return
        assert abs(ours[token] - theirs[token]) <= tolerance


def reset_within_a_second(llm: Any) -> bool:
    """`reset`, asked again while the engine still steps to end its last stores."""
    deadline = time.monotonic() + 1.0
    while not reset(llm):
        if time.monotonic() > deadline:
            return False
    return True


def number_of_groups(llm: Any) -> int:
    """KV cache groups of the model."""
    return len(scheduler(llm).kv_cache_config.kv_cache_groups)


def set_failure_policy(llm: Any, policy: str) -> None:
    """As if vLLM had been started with this `kv_load_failure_policy`."""
    scheduler(llm).recompute_kv_load_failures = policy == "recompute"
