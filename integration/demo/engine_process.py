"""What happens inside the process of an engine: start, answer, count."""

import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvplugin.integration.demo.environment import ENVIRONMENT
from kvplugin.integration.demo.model import KV_BYTES_PER_TOKEN
from kvplugin.integration.demo.prompts import Prompt
from kvplugin.integration.demo.results import Answer
from kvplugin.integration.demo.scale import BLOCK_TOKENS, Scale
from kvplugin.integration.demo.totals import read_sources, read_totals
from kvplugin.integration.vllm.render import offload_transfer_config


@dataclass(frozen=True)
class Job:
    """All that the process needs to know.

    `cpu_bytes` is the host memory for kvplugin's connector; None runs vLLM without.
    """

    model: Path
    scale: Scale
    prompts: list[Prompt]
    cpu_bytes: int | None


@dataclass(frozen=True)
class Started:
    """The engine is ready, so many seconds after its process."""

    seconds: float


@dataclass(frozen=True)
class Finished:
    """The last message: vLLM's metrics, as `read_totals` gives them."""

    totals: dict[str, float]


Message = Started | Answer | Finished


def engine_process(job: Job, log: Path, tell: Connection) -> None:
    """Entry of the process: one `Started`, an `Answer` for each prompt, `Finished`.

    Args:
        job: what to do.
        log: takes everything that this process prints.
        tell: the messages' way out.
    """
    began = time.monotonic()
    _print_to(log)
    # With the engine in this process, its metrics are in this process's registry.
    os.environ.update(ENVIRONMENT, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    engine = _start(job)
    _warm_up(engine)
    tell.send(Started(time.monotonic() - began))
    for answer in _answers(engine, job):
        tell.send(answer)
    tell.send(Finished(read_totals()))


def _print_to(log: Path) -> None:
    """Send stdout and stderr to a file, those of libraries written in C too."""
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _start(job: Job) -> Any:
    from vllm import LLM

    offload = {}
    if job.cpu_bytes is not None:
        offload["kv_transfer_config"] = offload_transfer_config(
            {"cpu_bytes_to_use": job.cpu_bytes}
        )
    return LLM(
        str(job.model),
        max_model_len=job.scale.prefix_tokens + 2 * BLOCK_TOKENS,
        max_num_batched_tokens=job.scale.chunk_tokens,
        block_size=BLOCK_TOKENS,
        kv_cache_memory_bytes=job.scale.cache_tokens * KV_BYTES_PER_TOKEN,
        enable_prefix_caching=True,
        enforce_eager=True,
        disable_log_stats=False,
        **offload,
    )


def _warm_up(engine: Any) -> None:
    """Pay for what only a first request pays, with too few tokens to be cached."""
    from vllm import SamplingParams

    engine.generate(
        {"prompt_token_ids": [1] * (BLOCK_TOKENS // 2)},
        SamplingParams(max_tokens=2),
        use_tqdm=False,
    )


def _answers(engine: Any, job: Job) -> Iterator[Answer]:
    """Ask one question after the other, each by one greedy request."""
    from vllm import SamplingParams

    # logprobs=0: of the chosen token only.
    greedy = SamplingParams(
        temperature=0.0, max_tokens=job.scale.answer_tokens, logprobs=0
    )
    before = read_sources()
    for prompt in job.prompts:
        (output,) = engine.generate(
            {"prompt_token_ids": prompt.token_ids}, greedy, use_tqdm=False
        )
        after = read_sources()
        yield _answer(prompt, output, after - before)
        before = after


def _answer(prompt: Prompt, output: Any, sources: Counter[str]) -> Answer:
    """One answer as the demo keeps it.

    The time to the first token is vLLM's own: from the arrival of the request to the
    step that gave the token, as in `vllm:time_to_first_token_seconds`. So the request
    that is timed is the one that gives the whole answer.
    """
    (completion,) = output.outputs
    return Answer(
        document=prompt.document,
        visit=prompt.visit,
        question=prompt.question,
        text=completion.text.strip(),
        token_ids=list(completion.token_ids),
        logprobs=[
            candidates[token].logprob
            for token, candidates in zip(
                completion.token_ids, completion.logprobs, strict=True
            )
        ],
        ttft_s=output.metrics.first_token_latency,
        computed_tokens=sources["computed"],
        local_tokens=sources["local"],
        loaded_tokens=sources["loaded"],
    )
