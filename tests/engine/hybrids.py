"""Tiny models of every kind of KV cache group, and what the tests ask of them alone."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engine import faults, models
from tests.engine.asking import ask, greedy, scheduler
from tests.engine.prompts import tokens
from tests.engine.version import is_019


@dataclass(frozen=True)
class Hybrid:
    """A model, and an engine so small that three of its prompts do not fit."""

    name: str
    build: Callable[[Path], Path]
    groups: int
    unit: int
    """Tokens that hits are a multiple of."""
    kv_bytes: int
    """Of the engine's KV cache."""
    step: int = 256
    """Tokens that a step computes at most."""
    block: int = 128
    """What prompts are measured in; the unit or a multiple."""
    noise: float = 0.02
    """Log-probabilities of one prompt differ by so much where its prefill is split
    differently."""
    preempts: bool = True
    """Whether three requests that grow are too many for the pool."""
    caches: bool = True
    """Whether vLLM itself finds blocks again on a CPU."""

    def prompt(self, seed: str, blocks: int, more: int = 0) -> list[int]:
        """So many blocks and tokens."""
        return tokens(f"{self.name} {seed}", blocks * self.block + more)

    def most(self, prompt: list[int]) -> int:
        """Tokens of a prompt that a hit can bring."""
        return (len(prompt) - 1) // self.unit * self.unit

    def arguments(self, folder: Path) -> dict[str, Any]:
        """Of `EngineHost`, less the connector's."""
        return {
            "model": str(self.build(folder / self.name)),
            "skip_tokenizer_init": True,
            "block_size": self.unit,  # or it depends on the processor
            "kv_cache_memory_bytes": self.kv_bytes,
            "max_model_len": 8 * self.block,
            "max_num_batched_tokens": self.step,
            "max_num_seqs": 8,
            "prepare": faults.copies_can_fail,
        }


GEMMA = Hybrid("gemma-6", models.tiny_gemma, groups=6, unit=128, kv_bytes=36 << 15)
GPT_OSS = Hybrid(
    "gpt-oss-4x", models.tiny_gpt_oss, groups=2, unit=128, kv_bytes=13 << 17
)
# vLLM neither caches nor chunks its prompts on a CPU without AMX.
DEEPSEEK = Hybrid(
    "deepseek-3b",
    models.tiny_deepseek,
    groups=1,
    unit=16,
    kv_bytes=70 * 3 * 18432,
    step=1024,
    noise=0.1,
    caches=False,
)
QWEN3_NEXT = Hybrid(
    "qwen3-next-4w",
    models.tiny_qwen3_next,
    groups=4,
    unit=256,
    kv_bytes=20 << 17,
    block=256,
    preempts=False,
)
HYBRIDS = (GEMMA, GPT_OSS, DEEPSEEK, QWEN3_NEXT)


def abort_while_loading(llm: Any, prompt: list[int]) -> bool:
    """Abort a request whose load is held; whether it was loading."""
    engine = llm.llm_engine
    faults.hold_loads(llm, True)
    engine.add_request("aborted", {"prompt_token_ids": prompt}, greedy(4))
    for _ in range(3):
        engine.step()
    was_loading = any(
        request.status.name == "WAITING_FOR_REMOTE_KVS"
        for request in scheduler(llm).requests.values()
    )
    engine.abort_request(["aborted"])
    engine.step()
    faults.hold_loads(llm, False)
    for _ in range(1000):
        if scheduler(llm).has_requests():
            engine.step()
        elif is_019() and scheduler(llm).requests:
            ask(llm, [[1]], 1)  # it steps for nothing but a request
        else:
            break
    return was_loading
