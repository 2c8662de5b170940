"""What the tests of policies ask an engine; functions as in `asking`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvplugin.integration.vllm.render import policy_arguments
from tests.engine.asking import BLOCK, Answer, answer_of, scheduler

TOPICS = ("the tides of the northern sea", "a garden behind an old mill")


def policies(**settings: Any) -> dict[str, Any]:
    """Engine arguments, as `kvplugin config policies` renders them."""
    return policy_arguments(settings)


@dataclass(frozen=True)
class Served:
    """What a workload came to."""

    texts: tuple[str, ...]
    cached_tokens: int


def hot_and_scans(llm: Any, rounds: int) -> Served:
    """Two long prefixes that come back each round, one-off prompts in between."""
    words = llm.get_tokenizer().encode
    texts, cached = [], 0
    for i in range(rounds):
        for topic in TOPICS:
            for prompt in (
                _cut(words(f"Notes on {topic}. " * 120), 4)
                + words(f"\nQuestion {i}: what is this about?\nAnswer:"),
                _cut(words(f"Item {i} on {topic} was read once. " * 90), 4),
            ):
                text, hit = _complete(llm, prompt)
                texts.append(text)
                cached += hit
    return Served(tuple(texts), cached)


def _cut(tokens: list[int], blocks: int) -> list[int]:
    return tokens[: blocks * BLOCK]


def _complete(llm: Any, prompt: list[int]) -> tuple[str, int]:
    from vllm import SamplingParams

    (output,) = llm.generate(
        [{"prompt_token_ids": prompt}],
        SamplingParams(temperature=0.0, max_tokens=6),
        use_tqdm=False,
    )
    return output.outputs[0].text, output.num_cached_tokens or 0


def uncached(llm: Any, prompts: list[list[int]], max_tokens: int) -> list[Answer]:
    """Greedy answers that read nothing from the cache."""
    from vllm import SamplingParams

    parameters = SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        logprobs=5,
        detokenize=False,
        skip_reading_prefix_cache=True,
    )
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], parameters, use_tqdm=False
    )
    return [answer_of(output) for output in outputs]


def ask_with(
    llm: Any, prompts: list[list[int]], extra_args: list[dict[str, Any] | None]
) -> list[tuple[int, ...]]:
    """Greedy tokens of prompts in one batch, each with its own extra arguments."""
    from vllm import SamplingParams

    parameters = [
        SamplingParams(temperature=0.0, max_tokens=4, detokenize=False, extra_args=args)
        for args in extra_args
    ]
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], parameters, use_tqdm=False
    )
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def server_arguments(llm: Any, body: dict[str, Any]) -> list[dict[str, Any] | None]:
    """The extra arguments that vLLM's server makes of a request's extra body."""
    del llm
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    requests = (
        CompletionRequest(prompt="Hello", **body),
        ChatCompletionRequest(messages=[{"role": "user", "content": "Hello"}], **body),
    )
    return [
        request.to_sampling_params(4, default_sampling_params={}).extra_args
        for request in requests
    ]


def pool_state(llm: Any) -> dict[str, Any]:
    """The scheduler's class and its pool after a check of both."""
    own = scheduler(llm)
    pool = own.kv_cache_manager.block_pool
    kvp = getattr(pool, "kvp", None)
    if kvp is not None:
        kvp.check()
    return {
        "class": type(own).__name__,
        "policy": None if kvp is None else kvp.policy_name,
        "failures": 0 if kvp is None else kvp.failures,
        "in use": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
    }


def install_plugin(folder: Path, name: str, module: str) -> None:
    """Make this process see `module` as an installed plugin."""
    import sys

    info = folder / f"{name}-1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[kvplugin]\n{name} = {module}\n")
    sys.path.insert(0, str(folder))


def trace_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a trace, its header first."""
    return [json.loads(line) for line in path.read_text().splitlines()]
