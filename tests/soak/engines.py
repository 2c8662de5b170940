"""The engine under test, and the one that says what is right."""

from pathlib import Path
from typing import Any, Final

from kvplugin.integration.demo.model import cache_folder
from tests.engine import asking
from tests.engine.asking import Answer
from tests.engine.host import EngineHost, offload
from tests.engine.models import tiny_gemma
from tests.engine.prompts import tokens
from tests.soak import load
from tests.soak.faults import TIMEOUT_S, copies_go_wrong
from tests.soak.outcome import Outcome

_BLOCK: Final = 32
_BLOCK_BYTES: Final = 2 * 64 * 4 * _BLOCK
"""Of one layer: fp32, one head of 64. Every group has one layer."""
_ENGINE: Final[dict[str, Any]] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "block_size": _BLOCK,
    "max_model_len": 1024,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 6,
}
_ENVIRONMENT: Final = {
    # Threads of a tiny model only wait for each other.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def prompts(documents: int, questions: int) -> list[list[int]]:
    """Each question about each document. Documents differ in length, some by a block,
    so that windows and prompts end everywhere in a block."""
    return [
        tokens(f"document {d}", 200 + 61 * d) + tokens(f"question {d} {q}", 3 + 17 * q)
        for d in range(documents)
        for q in range(questions)
    ]


def answers_of_stock(log: Path, model: Path, asked: list[list[int]]) -> list[Answer]:
    """Of vLLM alone."""
    host = EngineHost(
        log,
        environment=_ENVIRONMENT,
        model=str(model),
        kv_cache_memory_bytes=64 << 20,
        **_ENGINE,
    )
    try:
        answers: list[Answer] = host.run(asking.ask, asked, load.MAX_TOKENS)
        return answers
    finally:
        host.close()


def engine_under_test(log: Path, model: Path, **settings: Any) -> EngineHost:
    """Small pools, so that both evict, and requests are preempted."""
    return EngineHost(
        log,
        prepare=copies_go_wrong,
        environment=_ENVIRONMENT,
        model=str(model),
        kv_cache_memory_bytes=380 * _BLOCK_BYTES,
        kv_transfer_config=offload(
            900 * _BLOCK_BYTES, transfer_timeout_s=TIMEOUT_S, **settings
        ),
        **_ENGINE,
    )


def soak(
    folder: Path,
    seconds: float,
    seed: int,
    *,
    documents: int = 8,
    questions: int = 6,
    damage: bool = False,
) -> Outcome:
    """Run it.

    Args:
        folder: for the engines' logs.
        seconds: of random load.
        seed: of what is random.
        documents: that prompts begin with.
        questions: about each.
        damage: host memory afterwards, to see whether that would have been noticed.
    """
    model = tiny_gemma(cache_folder() / "tests" / "gemma-6")
    asked = prompts(documents, questions)
    right = answers_of_stock(folder / "stock.txt", model, asked)
    host = engine_under_test(folder / "engine.txt", model)
    try:
        outcome: Outcome = host.run(load.run, asked, right, seed, seconds)
        if damage:
            outcome.damage_seen = host.run(load.damage, asked, right)
        outcome.threads = host.run(load.end)
    finally:
        host.close()
    return outcome
