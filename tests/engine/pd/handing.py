"""What the tests ask engines that hand prompts over.

Every function takes the `LLM` first and runs in the engine's process.
"""

import time
from collections.abc import Sequence
from typing import Any

from tests.engine.asking import (
    Answer,
    answer_of,
    ask,
    assert_close,
    reset_within_a_second,
    scheduler,
)
from tests.engine.host import EngineHost
from tests.engine.version import is_019

HAND_OVER = {"do_remote_decode": True, "do_remote_prefill": False}
"""What a router sends to the first engine."""
Params = dict[str, Any]


def ask_with(
    llm: Any,
    prompts: Sequence[list[int]],
    params: Sequence[Any],
    max_tokens: int = 4,
) -> list[tuple[Answer, Params | None]]:
    """Greedy answers to a batch, each with its own `kv_transfer_params`, and what the
    engine says in return."""
    from vllm import SamplingParams

    outputs = llm.generate(
        [{"prompt_token_ids": list(prompt)} for prompt in prompts],
        [
            SamplingParams(
                temperature=0.0,
                max_tokens=max_tokens,
                logprobs=5,
                detokenize=False,
                ignore_eos=True,
                extra_args=None if one is None else {"kv_transfer_params": one},
            )
            for one in params
        ],
        use_tqdm=False,
    )
    return [(answer_of(output), output.kv_transfer_params) for output in outputs]


def prefill(llm: Any, prompts: Sequence[list[int]]) -> list[Params]:
    """What a producer hands over of each prompt."""
    answers = ask_with(llm, prompts, [dict(HAND_OVER) for _ in prompts], max_tokens=1)
    return [told for _, told in answers if told is not None]


def decode(
    llm: Any, prompts: Sequence[list[int]], params: Sequence[Any], max_tokens: int = 4
) -> list[Answer]:
    """Answers of a consumer."""
    return [answer for answer, _ in ask_with(llm, prompts, params, max_tokens)]


def blocks_in_use(llm: Any) -> int:
    """Blocks of the engine's pool that somebody holds."""
    pool = scheduler(llm).kv_cache_manager.block_pool
    return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())


def settle(llm: Any, seconds: float = 30.0) -> dict[str, int]:
    """Step the engine until nothing is held any more, or the time is over; what then
    still is.

    Runs the connector's own integrity check as well.
    """
    deadline = time.monotonic() + seconds
    while any((held := held_by(llm)).values()) and time.monotonic() < deadline:
        if scheduler(llm).has_requests():
            llm.llm_engine.step()
        elif is_019():
            # It steps for nothing but a request.
            ask(llm, [[1]], 1)
        else:
            time.sleep(0.001)
    return held


def end_leases(llm: Any) -> None:
    """What was handed over may not be read any more."""
    (half,) = [
        one._scheduler
        for one in _connectors(llm)
        if hasattr(getattr(one, "_scheduler", None), "_leases")
    ]
    half.reset()


def _connectors(llm: Any) -> list[Any]:
    connector = scheduler(llm).connector
    return list(getattr(connector, "sub_connectors", [connector]))


def held_by(llm: Any) -> dict[str, int]:
    """What is still held; every number should become 0."""
    held = {"blocks": blocks_in_use(llm), "requests": len(scheduler(llm).requests)}
    for one in _connectors(llm):
        half = getattr(one, "_scheduler", None)
        if hasattr(half, "_leases"):
            half.check()
            held["leases"] = len(half._leases)
    return held


def samples(
    llm: Any, prompt: list[int], params: Any, count: int
) -> list[dict[int, float]]:
    """Candidates for the first token of each of several samples of one request."""
    from vllm import SamplingParams

    (output,) = llm.generate(
        [{"prompt_token_ids": list(prompt)}],
        SamplingParams(
            n=count,
            max_tokens=4,
            logprobs=5,
            detokenize=False,
            ignore_eos=True,
            extra_args={"kv_transfer_params": params},
        ),
        use_tqdm=False,
    )
    return [
        {token: entry.logprob for token, entry in completion.logprobs[0].items()}
        for completion in output.outputs
    ]


def stepped(llm: Any, prompt: list[int]) -> Answer:
    """What follows a prompt whose last token is computed in a step of its own, as
    where another engine has computed the rest: states that are made in steps and in
    one go differ by rounding."""
    from vllm import SamplingParams

    (output,) = llm.generate(
        [{"prompt_token_ids": prompt[:-1]}],
        SamplingParams(
            temperature=0.0,
            max_tokens=2,
            logprobs=5,
            detokenize=False,
            ignore_eos=True,
            allowed_token_ids=[prompt[-1]],
        ),
        use_tqdm=False,
    )
    candidates = answer_of(output).candidates[1]  # as they were before that rule
    best = max(candidates, key=candidates.__getitem__)
    return Answer((best,), (candidates,), 0, "length")


def assert_goes_on(
    engine: EngineHost, prompt: list[int], answer: Answer, noise: float
) -> None:
    """Each token of an answer is what the engine itself says next.

    The first one comes of a state that is made in the same steps. Those of later ones
    are made token by token here, and in one go there: 0.06 apart at most, seen.
    """
    for i, (token, candidates) in enumerate(
        zip(answer.tokens, answer.candidates, strict=True)
    ):
        expected = engine.run(stepped, [*prompt, *answer.tokens[:i]])
        assert engine.run(reset_within_a_second)
        one = Answer((token,), (candidates,), 0, "length")
        assert_close(expected, one, max(noise, 0.1) if i else noise)
