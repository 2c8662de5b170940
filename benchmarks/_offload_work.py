"""What the offload benchmark asks of engines; runs in their processes, which alone
import vLLM and what needs it."""

import gc
import time
from pathlib import Path
from typing import Any, NamedTuple

from tests.engine.prompts import tokens


class FirstToken(NamedTuple):
    """One request for one token."""

    seconds: float
    cached_tokens: int


class Cost(NamedTuple):
    """Of some work."""

    seconds: float
    cpu_seconds: float
    """Of all threads of the process."""


def first_token(llm: Any, prompt: list[int], reset: bool) -> FirstToken:
    """Ask for one token, after the local cache was emptied if `reset`."""
    from tests.engine import asking

    assert not reset or asking.reset(llm), "something still holds blocks"
    start = time.perf_counter()
    answer = asking.ask_one(llm, prompt, 1)
    return FirstToken(time.perf_counter() - start, answer.cached_tokens)


def decode_step(llm: Any, requests: int, steps: int) -> Cost:
    """A step that decodes for all of some requests, none of which fills a block."""
    prompts = [tokens(f"idle {i}", 20) for i in range(requests)]
    engine = llm.llm_engine
    for number, prompt in enumerate(prompts):
        engine.add_request(
            f"decode {number}",
            {"prompt_token_ids": prompt},
            _decoding(steps + 2),
        )
    started: set[str] = set()
    while len(started) < requests:  # the prompts are no decode steps
        started.update(output.request_id for output in engine.step())
    taken = _Stopwatch()
    for _ in range(steps):
        engine.step()
    cost = taken.cost(per=steps)
    while engine.has_unfinished_requests():
        engine.step()
    return cost


def _decoding(max_tokens: int) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def requests_at_once(llm: Any, prompts: list[list[int]]) -> Cost:
    """One request: its share of some prompts in one batch, one token each."""
    from tests.engine import asking

    taken = _Stopwatch()
    answers = asking.ask(llm, prompts, 1)
    cost = taken.cost(per=len(prompts))
    assert not any(answer.cached_tokens for answer in answers), "a prompt was not new"
    return cost


def counter(llm: Any, name: str) -> float:
    """One of vLLM's metrics; 0 where there is none of this name."""
    from tests.engine import asking

    return asking.metrics(llm).get(name, 0.0)


def resident_bytes(llm: Any) -> int:
    """Memory of the engine's process."""
    del llm
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


class _Stopwatch:
    """Starts when it is made; garbage of earlier work is collected before."""

    def __init__(self) -> None:
        gc.collect()
        self._start = time.perf_counter()
        self._cpu = time.process_time()

    def cost(self, per: int) -> Cost:
        seconds = time.perf_counter() - self._start
        return Cost(seconds / per, (time.process_time() - self._cpu) / per)
