"""Tiny models of all layer mixes, and the comparison with the dense forward."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from msgspec import structs

from kvplugin.groups import blocks_per_request, reserved_blocks
from kvplugin.integration.reference import (
    Answer,
    EngineConfig,
    LayerConfig,
    Model,
    ModelConfig,
    ReferenceEngine,
    SamplingParams,
    dense_logits,
    random_model,
)
from kvplugin.integration.reference.connector import Connector
from kvplugin.integration.reference.ranks import Drafter
from kvplugin.integration.reference.sampling import Sampler
from kvplugin.scheduler import SchedulerConfig
from tests.reference.drafters import Oracle

FULL = LayerConfig()
WINDOW = LayerConfig(kind="sliding_window", window=10)
CHUNKED = LayerConfig(kind="chunked_local", chunk=12)
SINK = LayerConfig(kind="sink", sink_len=8)
MLA = LayerConfig(kind="mla")
RECORDS = LayerConfig(kind="mla_fp8")
DIFFKV = LayerConfig(head_size_v=4)
CROSS = LayerConfig(kind="cross")
ENCODER = LayerConfig(kind="encoder_only")
RECURRENT = LayerConfig(kind="recurrent")

MIXES: dict[str, tuple[LayerConfig, ...]] = {
    "full": (FULL, FULL),
    "full+window": (FULL, WINDOW, WINDOW, WINDOW),
    "full+chunked": (CHUNKED, CHUNKED, FULL),
    "full+recurrent": (RECURRENT, FULL, RECURRENT),
    "mla": (MLA, MLA),
    "mla+full": (MLA, FULL),
    "diffkv": (DIFFKV, FULL),
    "diffkv+window": (DIFFKV, LayerConfig(kind="sliding_window", window=7)),
    "sink": (SINK, SINK),
    "sharing": (FULL, WINDOW, LayerConfig(shares=0), FULL, LayerConfig(shares=3)),
    "window+recurrent+full": (WINDOW, RECURRENT, FULL, RECURRENT),
    "window": (WINDOW, WINDOW),
    "recurrent": (RECURRENT, RECURRENT),
}
"""Mixes that the prefix cache serves."""


def tiny(layers: Sequence[LayerConfig], **changes: Any) -> Model:
    """A random model of 32 hidden elements."""
    fp8 = any(layer.kind == "mla_fp8" for layer in layers)
    settings: dict[str, Any] = {
        "vocab_size": 61,
        "hidden_size": 32,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 8,
        "intermediate_size": 48,
        "layers": tuple(layers),
        "tie_embeddings": False,
        "kv_lora_rank": 512 if fp8 else 16,
        "rope_dim": 64 if fp8 else 8,
    }
    seed = changes.pop("seed", 0)
    return random_model(ModelConfig(**(settings | changes)), seed)


def settings(**changes: Any) -> EngineConfig:
    """An engine with small blocks; keys of the scheduler are told apart."""
    of_scheduler = {
        key: changes.pop(key)
        for key in list(changes)
        if key in SchedulerConfig.__struct_fields__
    }
    defaults: dict[str, Any] = {
        "block_size": 4,
        "num_blocks": 200,
        "max_model_len": 64,
        "record_logits": True,
    }
    scheduler = SchedulerConfig(
        **({"max_num_batched_tokens": 64, "max_num_seqs": 8} | of_scheduler)
    )
    return EngineConfig(scheduler=scheduler, **(defaults | changes))


def tight(model: Model) -> EngineConfig:
    """Blocks for one request of full length."""
    config = settings(scheduler_reserve_full_isl=False)
    return structs.replace(config, num_blocks=fewest_blocks(model, config))


def prompts(
    count: int, *, common: int = 13, own: int = 8, seed: int = 1
) -> list[list[int]]:
    """Prompts that begin alike and end differently."""
    generator = torch.Generator().manual_seed(seed)

    def draw(length: int) -> list[int]:
        tokens: list[int] = torch.randint(61, (length,), generator=generator).tolist()
        return tokens

    head = draw(common)
    return [head + draw(own + i) for i in range(count)]


def compare(
    model: Model,
    prompt: Sequence[int],
    answer: Answer,
    *,
    params: SamplingParams | None = None,
    encoder: Sequence[int] = (),
    tolerance: float = 1e-9,
    kv_cache_dtype: str | None = None,
) -> float:
    """Check an answer against one dense forward over prompt and answer: the tokens it
    would have chosen, and its logits. The largest difference of a logit."""
    tokens = [*prompt, *answer.token_ids]
    dense = dense_logits(
        model,
        tokens,
        num_prompt=len(prompt),
        encoder_token_ids=encoder,
        kv_cache_dtype=kv_cache_dtype,
    )
    temperature = 0.0 if params is None else params.temperature
    seed = 0 if params is None or params.seed is None else params.seed
    sampler = Sampler(temperature, seed)
    most = 0.0
    assert answer.token_ids
    for position in range(len(prompt), len(tokens)):
        wanted, found = dense[position - 1], answer.logits[position]
        most = max(most, float((wanted - found).abs().max()))
        assert sampler.token(found, position) == tokens[position]
        if tolerance < 1e-3:
            assert sampler.token(wanted, position) == tokens[position]
    assert most <= tolerance, f"logits differ by {most}"
    return most


@dataclass
class Seen:
    """What happened while an engine ran."""

    preemptions: int = 0
    chunked: bool = False
    """Whether a prompt took several steps."""
    drafts: int = 0
    steps: int = 0


def serve(
    model: Model,
    config: EngineConfig,
    rounds: Sequence[Sequence[Sequence[int]]],
    *,
    params: SamplingParams | None = None,
    tolerance: float = 1e-9,
    encoder: Sequence[int] = (),
    drafter: Drafter | None = None,
    connector: Connector | None = None,
    between: Callable[[ReferenceEngine], None] | None = None,
    kv_cache_dtype: str | None = None,
) -> tuple[ReferenceEngine, Seen]:
    """Serve rounds of prompts, compare every answer, and check the engine throughout.

    Args:
        between: called after each round.
        kv_cache_dtype: what the dense forward rounds rows to.
    """
    engine = ReferenceEngine(model, config, connector, drafter=drafter)
    params = SamplingParams(max_tokens=8) if params is None else params
    seen = Seen()
    for batch in rounds:
        ids = [
            engine.add_request(prompt, params, encoder_token_ids=encoder)
            for prompt in batch
        ]
        step_to_the_end(engine, seen)
        for req_id, prompt in zip(ids, batch, strict=True):
            answer = engine.answers[req_id]
            assert answer.finish_reason == "length"
            assert len(answer.token_ids) == params.max_tokens
            compare(
                model,
                prompt,
                answer,
                params=params,
                tolerance=tolerance,
                encoder=encoder,
                kv_cache_dtype=kv_cache_dtype,
            )
        if between is not None:
            between(engine)
    assert_empty(engine)
    engine.close()
    return engine, seen


def step_to_the_end(engine: ReferenceEngine, seen: Seen | None = None) -> Seen:
    """Step, check after each, and tell what happened."""
    seen = Seen() if seen is None else seen
    requests = engine.scheduler.requests
    before: dict[str, int] = {}
    while engine.has_work():
        assert seen.steps < 5000, engine.state()
        seen.steps += 1
        seen.drafts += sum(len(entry.drafts) for entry in requests.values())
        engine.step()
        engine.check()
        for req_id, entry in requests.items():
            request = entry.request
            new = request.num_preemptions - before.get(req_id, 0)
            before[req_id] = request.num_preemptions
            seen.preemptions += new
            seen.chunked |= 0 < request.num_computed_tokens < request.num_prompt_tokens
    return seen


def assert_empty(engine: ReferenceEngine) -> None:
    """Every block has come back, and every table row is empty."""
    pool = engine.manager.block_pool
    engine.check()
    assert pool.get_num_free_blocks() == pool.num_usable_blocks
    for runner in engine.ranks.runners:
        assert not runner.batch.requests


def forget_local(engine: ReferenceEngine) -> None:
    """Forget what the engine has cached, but not what the connector has."""
    assert engine.reset_prefix_cache(local_only=True)


def fewest_blocks(model: Model, config: EngineConfig) -> int:
    """The smallest pool that serves a request of full length."""
    drafter = Oracle(model, config.num_drafts, 0.0) if config.num_drafts else None
    plan = ReferenceEngine(model, config, drafter=drafter).plan
    groups = plan.scheduler.kv_cache_groups
    blocks = blocks_per_request(groups, plan.limits)
    return blocks + reserved_blocks(groups, plan.limits)
