"""The random load, in the process of the engine under test."""

import os
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.engine import asking
from tests.engine.asking import Answer
from tests.soak.faults import FAULTS
from tests.soak.outcome import Outcome

TOLERANCE: Final = 1e-3
"""Of log-probabilities, in fp32: other batches and chunks change the order of sums."""
MAX_TOKENS: Final = 16
_AT_ONCE: Final = 8
_SAMPLE_S: Final = 1.0
_DRAIN_S: Final = 60.0
_METRICS: Final = (
    *("loaded_tokens", "loaded_bytes", "stored_bytes", "evicted_blocks"),
    *("failed_loads", "failed_stores"),
)


def difference(found: Answer, right: Answer) -> str:
    """Where two greedy answers to one prompt part, `right` being the longer one; empty
    for nowhere. Tokens may part where the best two are as good as each other."""
    for at, token in enumerate(found.tokens):
        mine, theirs = found.candidates[at], right.candidates[at]
        if token != right.tokens[at]:
            best, second = sorted(theirs.values(), reverse=True)[:2]
            if best - second <= TOLERANCE:
                return ""
            return f"token {at} is {token}, not {right.tokens[at]}"
        if abs(mine[token] - theirs[token]) > TOLERANCE:
            return f"token {at}: log-probability {mine[token]}, not {theirs[token]}"
    return ""


@dataclass
class Soak:
    """One run.

    Args:
        llm: the engine.
        prompts: what is asked.
        right: the answers, of `MAX_TOKENS` tokens.
        seed: of everything random.
    """

    llm: Any
    prompts: Sequence[Sequence[int]]
    right: Sequence[Answer]
    seed: int
    outcome: Outcome = field(default_factory=Outcome)
    asked: dict[str, int] = field(default_factory=dict)
    """Requests that have not ended: id -> number of the prompt."""

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._quiet = False

    def run(self, seconds: float) -> Outcome:
        """Ask, abort and reset by chance for so long, and then let all end."""
        start = time.monotonic()
        sampled = start - _SAMPLE_S
        FAULTS.is_on = True
        while (now := time.monotonic()) < start + seconds:
            if now >= sampled + _SAMPLE_S:
                self.outcome.memory.append((now - start, resident_mib()))
                sampled = now
            self._act()
            self._step()
        FAULTS.is_on = False
        self._drain()
        self.outcome.seconds = time.monotonic() - start
        self.outcome.faults = dict(FAULTS.counts)
        metrics = asking.metrics(self.llm)
        self.outcome.metrics = {
            name: metrics.get(f"vllm:kvplugin_offload_{name}", 0.0) for name in _METRICS
        } | {"preemptions": metrics["vllm:num_preemptions"]}
        self.outcome.held = asking.balance(self.llm)
        return self.outcome

    def _act(self) -> None:
        chance = self._random.random
        if self._quiet and not self.asked:
            self._quiet = False
            self._reset(self._random.choice(["plain", "plain", "both"]))
        if not self._quiet and len(self.asked) < _AT_ONCE and chance() < 0.5:
            self._ask()
        if self.asked and chance() < 0.02:
            self._abort(self._random.choice(list(self.asked)))
        if chance() < 0.006:
            self._reset(self._random.choice(["plain", "both", "running"]))
        if chance() < 0.006:
            self._quiet = True  # nobody asks until all have their answers

    def _ask(self) -> None:
        from vllm import SamplingParams

        number = self._random.randrange(len(self.prompts))
        req_id = f"soak-{self.outcome.requests}"
        self.outcome.requests += 1
        self.outcome.prompt_tokens += len(self.prompts[number])
        self.asked[req_id] = number
        params = SamplingParams(
            temperature=0.0,
            max_tokens=self._random.randint(1, MAX_TOKENS),
            logprobs=5,
            detokenize=False,
        )
        self.llm.llm_engine.add_request(
            req_id, {"prompt_token_ids": list(self.prompts[number])}, params
        )

    def _abort(self, req_id: str) -> None:
        self.llm.llm_engine.abort_request([req_id])
        del self.asked[req_id]
        self.outcome.aborted += 1

    def _reset(self, kind: str) -> None:
        try:
            done = self.llm.reset_prefix_cache(
                reset_running_requests=kind == "running",
                reset_connector=kind != "plain",
            )
        except RuntimeError:  # vLLM's, where it was to preempt what waits for a load
            assert kind == "running"
            done = False
        if kind == "plain":
            self.outcome.resets += done
        elif kind == "both":
            self.outcome.resets_of_both += done
        else:
            self.outcome.resets_while_running += done

    def _step(self) -> None:
        self.outcome.steps += 1
        for output in self.llm.llm_engine.step():
            if output.finished and output.request_id in self.asked:
                self._judge(output)

    def _judge(self, output: Any) -> None:
        number = self.asked.pop(output.request_id)
        answer = asking.answer_of(output)
        self.outcome.answered += 1
        self.outcome.cached_tokens += answer.cached_tokens
        wrong = difference(answer, self.right[number])
        if answer.finish_reason != "length":
            wrong = f"it ended by {answer.finish_reason}"
        if wrong:
            self.outcome.wrong.append(f"{output.request_id}: {wrong}")

    def _drain(self) -> None:
        """Until nothing is under way; what does not end is seen in the balance."""
        half = asking.scheduler(self.llm).connector._scheduler
        limit = time.monotonic() + _DRAIN_S
        while self.asked or half.has_pending_work():
            if time.monotonic() > limit:
                return
            self._step()


def run(
    llm: Any,
    prompts: Sequence[Sequence[int]],
    right: Sequence[Answer],
    seed: int,
    seconds: float,
) -> Outcome:
    """A soak of this engine."""
    return Soak(llm, prompts, right, seed).run(seconds)


def damage(llm: Any, prompts: Sequence[list[int]], right: Sequence[Answer]) -> int:
    """Damage all of host memory; the answers from it that are seen to be wrong."""
    asking.reset(llm)
    asking.corrupt_host_memory(llm)
    found = asking.ask(llm, list(prompts), MAX_TOKENS)
    return sum(
        bool(difference(one, other)) for one, other in zip(found, right, strict=True)
    )


def end(llm: Any) -> list[str]:
    """End the engine; names of the connector's threads that are left."""
    llm.llm_engine.engine_core.shutdown()
    return [t.name for t in threading.enumerate() if t.name.startswith("kvplugin")]


def resident_mib() -> float:
    """Memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)
