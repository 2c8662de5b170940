"""The models are real: what is prepared is loaded and speaks."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvplugin.integration.demo import model
from kvplugin.integration.demo.prompts import prompts
from kvplugin.integration.demo.scale import BLOCK_TOKENS, FULL, QUICK, Scale


def test_smollm2_is_a_plain_bf16_checkpoint(smollm2: Path) -> None:
    config = json.loads((smollm2 / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert "quantization_config" not in config
    weights = load_file(smollm2 / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}


def test_kv_bytes_per_token_is_what_the_checkpoint_says(smollm2: Path) -> None:
    config = json.loads((smollm2 / "config.json").read_text())
    numbers = config["num_hidden_layers"] * config["num_key_value_heads"]
    assert numbers * config["head_dim"] * 2 * 2 == model.KV_BYTES_PER_TOKEN


def test_smollm2_knows_paris(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    speaker = AutoModelForCausalLM.from_pretrained(smollm2)
    question = tokenizer("The capital of France is", return_tensors="pt")
    answer = speaker.generate(**question, max_new_tokens=1, do_sample=False)
    assert tokenizer.decode(answer[0, -1]) == " Paris"


def test_smollm2_keeps_its_chat_template(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}],
        add_generation_prompt=True,
        tokenize=False,
    )
    assert chat.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")


def test_preparing_again_finds_the_folder(
    model_cache: Path, smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "_dequantise", lambda _: pytest.fail("prepared twice"))
    assert model.prepare_smollm2(model_cache) == smollm2


def test_cache_folder_can_be_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPLUGIN_CACHE", str(tmp_path))
    assert model.cache_folder() == tmp_path


@pytest.mark.parametrize("scale", [FULL, QUICK])
def test_prompts_share_whole_chunks_and_nothing_else(
    smollm2: Path, scale: Scale
) -> None:
    asked = prompts(smollm2, scale)
    assert len(asked) == scale.requests
    assert len({(prompt.document, prompt.question) for prompt in asked}) == len(asked)
    documents: dict[str, set[tuple[int, ...]]] = {}
    for prompt in asked:
        assert 0 < len(prompt.token_ids) - scale.prefix_tokens < BLOCK_TOKENS
        start = tuple(prompt.token_ids[: scale.prefix_tokens])
        documents.setdefault(prompt.document, set()).add(start)
    assert all(len(starts) == 1 for starts in documents.values())
    first_blocks = {start[:BLOCK_TOKENS] for (start,) in documents.values()}
    assert len(first_blocks) == scale.documents


@pytest.mark.parametrize("scale", [FULL, QUICK])
def test_other_documents_push_one_out(scale: Scale) -> None:
    between_visits = (scale.documents - 1) * scale.prefix_tokens
    # One block of the cache is vLLM's null block.
    assert between_visits >= scale.cache_tokens - BLOCK_TOKENS


def test_tiny_llama_depends_on_its_seed_only(tmp_path: Path) -> None:
    one, same, other = (
        load_file(model.tiny_llama(tmp_path / name, seed=seed) / "model.safetensors")
        for name, seed in (("one", 1), ("same", 1), ("other", 2))
    )
    assert one.keys() == same.keys() == other.keys()
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_tiny_llama_leaves_the_random_state_alone(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    model.tiny_llama(tmp_path / "tiny")
    assert torch.equal(torch.get_rng_state(), before)
