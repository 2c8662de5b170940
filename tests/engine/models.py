"""Generated models whose shapes matter more than their words."""

from pathlib import Path

from kvplugin.integration.demo.build_once import build_once


def tiny_gemma(folder: Path) -> Path:
    """A random Gemma-3 text model: five sliding-window layers to one full layer, so
    several KV cache groups. Vocabulary of 512, no tokenizer."""

    def build(empty: Path) -> None:
        import torch
        from transformers import Gemma3ForCausalLM, Gemma3TextConfig

        config = Gemma3TextConfig(
            vocab_size=512,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=6,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=64,
            sliding_window=256,
            max_position_embeddings=8192,
        )
        torch.manual_seed(0)
        Gemma3ForCausalLM(config).to(torch.bfloat16).save_pretrained(empty)

    return build_once(folder, build)
