"""A random model and random users around any scheduler, and what it decides.

Equal decisions keep two runs equal, so the first difference shows in the transcript.
"""

from dataclasses import dataclass
from random import Random
from typing import Any, Protocol


@dataclass(frozen=True)
class Run:
    """Groups are described as in `vllm_core`."""

    groups: list[tuple[str, dict[str, Any]]]
    num_blocks: int
    seed: int
    block_size: int = 4
    max_model_len: int = 128
    budget: int = 48
    steps: int = 80
    policy: str = "fcfs"
    drafts: int = 0
    enable_caching: bool = True
    reserve_full_isl: bool = True


class Engine(Protocol):
    """A scheduler as the driver sees it."""

    def add(
        self, name: str, tokens: list[int], max_tokens: int, priority: int, arrival: int
    ) -> None: ...
    def live(self) -> list[str]: ...
    def abort(self, name: str) -> None: ...
    def schedule(self) -> tuple[Any, ...]:
        """Put a step under way: what was decided."""

    def batch(self) -> list[tuple[str, int, bool]]:
        """Of the step: request, drafts to verify, whether it samples."""

    def answer(
        self, tokens: dict[str, list[int]], drafts: dict[str, list[int]]
    ) -> None:
        """The step's output: new tokens and new drafts by request."""

    def blocks(self) -> tuple[Any, ...]:
        """Free blocks and usage."""


def drive(run: Run, engine: Engine) -> list[tuple[Any, ...]]:
    """What the scheduler decides, step by step."""
    random, log, count = Random(run.seed), [], 0

    def words(n: int) -> list[int]:
        return [random.randrange(90) + 2 for _ in range(n)]

    prompts = [words(run.max_model_len) for _ in range(3)]
    for _ in range(run.steps):
        if random.random() < 0.6:
            count += 1
            shared = random.choice(prompts)[
                : random.randrange(1, run.max_model_len - 20)
            ]
            tokens = shared + words(5)
            max_tokens, priority = random.randrange(1, 12), random.randrange(3)
            engine.add(f"r{count}", tokens, max_tokens, priority, count)
        log.append(("step", *engine.schedule()))
        tokens, drafts = {}, {}
        for name, num_drafts, samples in engine.batch():
            tokens[name] = words(random.randint(0, num_drafts) + 1 if samples else 0)
        for name, new in tokens.items():
            drafts[name] = words(random.randint(0, run.drafts) if new else 0)
        engine.answer(tokens, drafts)
        if random.random() < 0.1 and engine.live():
            engine.abort(random.choice(sorted(engine.live())))
        log.append(("blocks", *engine.blocks()))
    return log
