"""A real model: its greedy tokens are those of transformers."""

from pathlib import Path

import pytest
import torch

from kvplugin.integration.demo.model import cache_folder, prepare_smollm2
from kvplugin.integration.reference import (
    EngineConfig,
    Model,
    ReferenceEngine,
    SamplingParams,
    load_model,
)
from tests.reference.models import assert_empty

pytestmark = pytest.mark.engine

TEXTS = ("The capital of France is", "Water boils at a temperature of")
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def folder() -> Path:
    return prepare_smollm2(cache_folder())


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return load_model(folder, "float32")


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[tuple[list[int], list[int]]]:
    """Prompts and greedy answers of transformers in fp32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answers = []
    for text in TEXTS:
        prompt = tokenizer(text).input_ids
        with torch.no_grad():
            output = theirs.generate(
                torch.tensor([prompt]),
                max_new_tokens=NUM_TOKENS,
                min_new_tokens=NUM_TOKENS,
                do_sample=False,
            )
        answers.append((prompt, output[0, len(prompt) :].tolist()))
    assert "Paris" in tokenizer.decode(answers[0][1])
    return answers


@pytest.mark.parametrize(("layout", "ranks"), [("NHD", 1), ("HND", 3)])
def test_greedy_tokens_are_those_of_transformers(
    model: Model,
    expected: list[tuple[list[int], list[int]]],
    layout: str,
    ranks: int,
) -> None:
    """In fp32, where the two differ by the order of sums only."""
    config = EngineConfig(
        layout=layout,
        tensor_parallel_size=ranks,
        num_blocks=40,
        block_size=4,
        max_model_len=64,
    )
    engine = ReferenceEngine(model, config)
    params = SamplingParams(max_tokens=NUM_TOKENS)
    prompts = [prompt for prompt, _ in expected]
    for hits in (False, True):
        answers = engine.generate(prompts, params)
        assert [a.token_ids for a in answers] == [tokens for _, tokens in expected]
        assert all(bool(a.num_cached_tokens) == hits for a in answers)
    assert_empty(engine)
