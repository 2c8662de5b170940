"""Models that are handed over, with what makes an engine small enough."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvplugin.integration.demo.model import cache_folder, prepare_smollm2, tiny_llama
from tests.engine.hybrids import DEEPSEEK, GEMMA, GPT_OSS, QWEN3_NEXT, Hybrid


@dataclass(frozen=True)
class Handed:
    """A model."""

    name: str
    folder: Callable[[], Path]
    groups: int
    block_sizes: tuple[int, ...] = (32, 64, 128)
    """That vLLM can give it on a CPU."""
    noise: float = 0.02
    """Log-probabilities of one prompt differ by so much where its prefill is split
    differently."""
    has_tokenizer: bool = False
    has_states: bool = False

    def arguments(self) -> dict[str, Any]:
        """Of `EngineHost`."""
        return {
            "model": str(self.folder()),
            "skip_tokenizer_init": not self.has_tokenizer,
            "kv_cache_memory_bytes": 256 << 20 if self.has_tokenizer else 64 << 20,
        }


def _hybrid(hybrid: Hybrid, **fields: Any) -> Handed:
    return Handed(
        hybrid.name,
        lambda: hybrid.build(cache_folder() / "tests" / hybrid.name),
        hybrid.groups,
        noise=hybrid.noise,
        **fields,
    )


LLAMA = Handed(
    "llama",
    lambda: tiny_llama(cache_folder() / "tests" / "llama-4x2", layers=4),
    1,
)
SMOLLM2 = Handed(
    "smollm2",
    lambda: prepare_smollm2(cache_folder()),
    1,
    noise=0.25,  # two steps of bf16 at its logits near 20: as much as of a local hit
    has_tokenizer=True,
)
GEMMA_3 = _hybrid(GEMMA)
GPT = _hybrid(GPT_OSS)
LATENT = _hybrid(DEEPSEEK, block_sizes=(16,))
STATES = _hybrid(QWEN3_NEXT, block_sizes=(256,), has_states=True)
