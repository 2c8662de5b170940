"""What an engine did with its blocks, step by step: of stock vLLM and of ours, in the
same words.

`of_vllm` runs in the process of the other engine and takes its `LLM` first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from kvplugin.integration.reference import Answer, ReferenceEngine, SamplingParams


class Running(NamedTuple):
    """A request after a step."""

    request: int
    """Its number among the prompts."""
    num_computed: int
    blocks: tuple[int, ...]


class Step(NamedTuple):
    """An engine after a step."""

    running: tuple[Running, ...]
    num_used: int
    """Blocks that requests hold."""


class Greedy(NamedTuple):
    """An answer, and how sure its engine was of each token."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    gaps: tuple[float, ...]
    """Between the logits of the best and the second best."""
    num_cached: int


@dataclass(frozen=True)
class Trace:
    """Some prompts, served together."""

    answers: tuple[Greedy, ...]
    steps: tuple[Step, ...]
    num_preemptions: int


def of_ours(
    engine: ReferenceEngine, prompts: Sequence[Sequence[int]], max_tokens: int
) -> Trace:
    """Serve prompts on our engine, which records its logits."""
    params = SamplingParams(max_tokens=max_tokens)
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    entries, steps = dict(engine.scheduler.requests), []
    pool = engine.manager.block_pool
    while engine.has_work():
        engine.step()
        engine.check()
        running = tuple(
            Running(
                ids.index(entry.id),
                entry.request.num_computed_tokens,
                tuple(engine.manager.get_block_ids(entry.id)[0]),
            )
            for entry in engine.scheduler.requests.values()
            if entry.status == "running"
        )
        used = pool.num_usable_blocks - pool.get_num_free_blocks()
        steps.append(Step(running, used))
    answers = [
        _our_greedy(len(prompt), engine.answers[req_id])
        for req_id, prompt in zip(ids, prompts, strict=True)
    ]
    preemptions = sum(entry.request.num_preemptions for entry in entries.values())
    return Trace(tuple(answers), tuple(steps), preemptions)


def _our_greedy(num_prompt: int, answer: Answer) -> Greedy:
    places = range(num_prompt, num_prompt + len(answer.token_ids))
    logits = torch.stack([answer.logits[place] for place in places]).float()
    best, second = logits.log_softmax(-1).topk(2).values.unbind(-1)
    return Greedy(
        tuple(answer.token_ids),
        tuple(best.tolist()),
        tuple((best - second).tolist()),
        answer.num_cached_tokens,
    )


def of_vllm(llm: Any, prompts: Sequence[Sequence[int]], max_tokens: int) -> Trace:
    """Serve prompts on stock vLLM, engine in one process."""
    from vllm import SamplingParams as TheirParams

    greedy = TheirParams(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=True,
        logprobs=2,
        detokenize=False,
    )
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    manager = scheduler.kv_cache_manager
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), {"prompt_token_ids": list(prompt)}, greedy)
    requests, steps = dict(scheduler.requests), []
    answers: dict[int, Greedy] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                answers[int(output.request_id)] = _their_greedy(output)
        running = tuple(
            Running(
                int(request.request_id.split("-")[0]),  # vLLM adds a random part
                request.num_computed_tokens,
                tuple(manager.get_block_ids(request.request_id)[0]),
            )
            for request in scheduler.running
        )
        pool = manager.block_pool
        used = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        steps.append(Step(running, used))
    preemptions = sum(request.num_preemptions for request in requests.values())
    ordered = tuple(answers[index] for index in range(len(prompts)))
    return Trace(ordered, tuple(steps), preemptions)


def _their_greedy(output: Any) -> Greedy:
    (completion,) = output.outputs
    tokens = tuple(completion.token_ids)
    chosen, gaps = [], []
    for token, candidates in zip(tokens, completion.logprobs, strict=True):
        best, second, *_ = sorted(c.logprob for c in candidates.values())[::-1]
        chosen.append(candidates[token].logprob)
        gaps.append(best - second)
    return Greedy(tokens, tuple(chosen), tuple(gaps), output.num_cached_tokens or 0)
