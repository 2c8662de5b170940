"""Random requests on random engines: arrivals, aborts, pressure, drafts, ranks."""

import random
from typing import Any

import pytest
from msgspec import structs

from kvplugin.integration.reference import (
    EngineConfig,
    Model,
    ReferenceEngine,
    SamplingParams,
)
from tests.reference.drafters import Oracle
from tests.reference.models import (
    MIXES,
    assert_empty,
    compare,
    fewest_blocks,
    settings,
    tiny,
)

HEADS = [[(i * k + 5) % 61 for i in range(21)] for k in (7, 11)]
"""Prompts begin with a part of one of these."""


@pytest.mark.parametrize(
    "seed",
    [*range(6), *(pytest.param(n, marks=pytest.mark.full) for n in range(6, 60))],
)
def test_answers_stay_right_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    mix = rng.choice(sorted(MIXES))
    model = tiny(MIXES[mix], seed=seed)
    config = _engine(rng, model)
    drafter = Oracle(model, config.num_drafts, 0.6) if config.num_drafts else None
    engine = ReferenceEngine(model, config, drafter=drafter)
    asked: dict[str, tuple[list[int], SamplingParams]] = {}
    left = 14
    while engine.has_work() or left:
        if left and rng.random() < 0.4:
            left -= 1
            prompt, params = _request(rng)
            asked[engine.add_request(prompt, params)] = prompt, params
        if asked and rng.random() < 0.03:
            engine.abort(rng.choice(sorted(asked)))
        if rng.random() < 0.02:
            engine.reset_prefix_cache()
        engine.step()
        engine.check()
    for req_id, (prompt, params) in asked.items():
        answer = engine.answers[req_id]
        if answer.finish_reason == "length":
            assert len(answer.token_ids) == params.max_tokens
            compare(model, prompt, answer, params=params)
        else:
            assert answer.finish_reason == "abort"
    assert_empty(engine)


def _engine(rng: random.Random, model: Model) -> EngineConfig:
    drafts = rng.choice([0, 0, 2])
    choices: dict[str, Any] = {
        "block_size": rng.choice([4, 8]),
        "layout": rng.choice(["NHD", "HND"]),
        "tensor_parallel_size": rng.choice([1, 1, 2]),
        "mamba_cache_mode": rng.choice(["none", "align", "align", "all"]),
        "num_drafts": drafts,
        "max_num_batched_tokens": rng.choice([24, 32, 80]),
        "max_num_seqs": rng.choice([2, 4, 8]),
        "long_prefill_token_threshold": 0,
        "pipeline_depth": 1 if drafts else rng.choice([1, 2]),
        "policy": rng.choice(["fcfs", "priority"]),
        "scheduler_reserve_full_isl": rng.random() < 0.3,
    }
    config = settings(**choices)
    blocks = fewest_blocks(model, config) + rng.choice([0, 2, 20])
    return structs.replace(config, num_blocks=blocks)


def _request(rng: random.Random) -> tuple[list[int], SamplingParams]:
    head = rng.choice(HEADS)[: rng.randrange(1, 21)]
    prompt = head + [rng.randrange(61) for _ in range(rng.randrange(0, 14))]
    params = SamplingParams(
        max_tokens=rng.randrange(1, 24),
        temperature=rng.choice([0.0, 0.8]),
        seed=rng.randrange(100),
    )
    return prompt, params
