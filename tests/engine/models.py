"""Generated models whose shapes matter more than their words.

All of them have random weights, a vocabulary of 512 and no tokenizer.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from kvplugin.integration.demo.build_once import build_once

VOCABULARY = 512
SPREAD = 0.1
"""Of random weights: with the usual 0.02 an answer hardly depends on the prompt."""

_SMALL: Final = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "max_position_embeddings": 8192,
}
"""Of all of them."""


def _random_model(folder: Path, make: Callable[[], Any]) -> Path:
    """`folder` with the model that `make` returns, always the same weights."""

    def build(empty: Path) -> None:
        import torch

        torch.manual_seed(0)
        make().to(torch.bfloat16).save_pretrained(empty)

    return build_once(folder, build)


def tiny_gemma(folder: Path) -> Path:
    """A random Gemma-3 text model: five sliding-window layers to one full layer, so
    several KV cache groups."""

    def make() -> Any:
        from transformers import Gemma3ForCausalLM, Gemma3TextConfig

        return Gemma3ForCausalLM(
            Gemma3TextConfig(
                **_SMALL,
                intermediate_size=256,
                num_hidden_layers=6,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=64,
                sliding_window=256,
            )
        )

    return _random_model(folder, make)


def tiny_mistral(folder: Path) -> Path:
    """A random Mistral whose layers all have a window of 128: one group, not dense."""

    def make() -> Any:
        from transformers import MistralConfig, MistralForCausalLM

        return MistralForCausalLM(
            MistralConfig(
                **_SMALL,
                intermediate_size=256,
                num_hidden_layers=3,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=64,
                sliding_window=128,
                initializer_range=SPREAD,
            )
        )

    return _random_model(folder, make)


def tiny_gpt_oss(folder: Path) -> Path:
    """A random gpt-oss: a window of 128 and full attention in turn, two groups of two
    layers, four experts."""

    def make() -> Any:
        from transformers import GptOssConfig, GptOssForCausalLM

        return GptOssForCausalLM(
            GptOssConfig(
                **_SMALL,
                intermediate_size=128,
                num_hidden_layers=4,
                num_local_experts=4,
                num_experts_per_tok=4,  # none is left out for a rounding error's sake
                head_dim=64,
                num_attention_heads=4,
                num_key_value_heads=2,
                sliding_window=128,
                initializer_range=SPREAD,
                eos_token_id=1,
                pad_token_id=0,
            )
        )

    return _random_model(folder, make)


def tiny_deepseek(folder: Path) -> Path:
    """A random DeepSeek-V3: one group of latent attention, 576 numbers a token and
    layer."""

    def make() -> Any:
        from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

        return DeepseekV3ForCausalLM(
            DeepseekV3Config(
                **_SMALL,
                intermediate_size=256,
                moe_intermediate_size=128,
                num_hidden_layers=3,
                num_attention_heads=4,
                num_key_value_heads=4,
                n_routed_experts=4,
                n_shared_experts=1,
                n_group=1,
                topk_group=1,
                num_experts_per_tok=4,  # none is left out for a rounding error's sake
                first_k_dense_replace=1,
                kv_lora_rank=512,
                q_lora_rank=64,
                qk_rope_head_dim=64,
                qk_nope_head_dim=32,
                v_head_dim=32,
                initializer_range=0.04,  # its two ways of computing differ by rounding
                topk_method="noaux_tc",
                scoring_func="sigmoid",
            )
        )

    return _random_model(folder, make)


def tiny_qwen3_next(folder: Path) -> Path:
    """A random Qwen3-Next: three groups of recurrent states to one of full attention,
    four experts."""

    def make() -> Any:
        from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

        model = Qwen3NextForCausalLM(
            Qwen3NextConfig(
                **_SMALL,
                intermediate_size=128,
                moe_intermediate_size=128,
                shared_expert_intermediate_size=128,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=64,
                linear_key_head_dim=64,
                linear_value_head_dim=64,
                linear_num_key_heads=2,
                linear_num_value_heads=4,
                num_experts=4,
                num_experts_per_tok=2,
                initializer_range=SPREAD,
                layer_types=[*["linear_attention"] * 3, "full_attention"],
            )
        )
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.data.fill_(-5.0)  # states that last for hundreds of tokens
        return model

    return _random_model(folder, make)
