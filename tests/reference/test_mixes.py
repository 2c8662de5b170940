"""Every mix of layers answers as the dense forward does."""

import pytest
from msgspec import structs

from kvplugin.errors import ConfigError
from kvplugin.integration.reference import (
    LayerConfig,
    ReferenceEngine,
    SamplingParams,
    dense_generate,
)
from kvplugin.integration.reference.sampling import Sampler
from tests.reference.models import (
    CROSS,
    ENCODER,
    FULL,
    MIXES,
    MLA,
    RECORDS,
    RECURRENT,
    WINDOW,
    fewest_blocks,
    prompts,
    serve,
    settings,
    tight,
    tiny,
)

WITH_STATES = [name for name, layers in MIXES.items() if RECURRENT in layers]


@pytest.mark.parametrize("mix", MIXES)
def test_prefix_hits(mix: str) -> None:
    batch = prompts(3)
    engine, _ = serve(tiny(MIXES[mix]), settings(), [batch[:1], batch, batch])
    assert any(a.num_cached_tokens for a in engine.answers.values())


@pytest.mark.parametrize("budget", [5, pytest.param(11, marks=pytest.mark.full), 17])
@pytest.mark.parametrize("mix", MIXES)
def test_prompts_in_chunks(mix: str, budget: int) -> None:
    least = 20 if mix in WITH_STATES else 1  # a step has to reach a block's end
    config = settings(max_num_batched_tokens=max(budget, least))
    batch = prompts(4, common=9, own=17)
    _, seen = serve(tiny(MIXES[mix]), config, [batch, batch[1:]])
    assert seen.chunked


@pytest.mark.parametrize("mix", MIXES)
def test_preemption_and_eviction(mix: str) -> None:
    """Enough blocks for one long request, not for what runs."""
    model = tiny(MIXES[mix])
    params = SamplingParams(max_tokens=40)
    batch = prompts(5, common=6, own=14)
    _, seen = serve(model, tight(model), [batch, batch[::-1]], params=params)
    if mix != "window" and mix != "recurrent":  # whose requests stop growing
        assert seen.preemptions


@pytest.mark.parametrize("mode", ["none", "all", "align"])
@pytest.mark.parametrize("mix", WITH_STATES)
def test_modes_of_states(mix: str, mode: str) -> None:
    batch = prompts(3, common=22)
    config = settings(mamba_cache_mode=mode, max_num_batched_tokens=24)
    engine, _ = serve(tiny(MIXES[mix]), config, [batch[:1], batch, batch])
    hits = any(a.num_cached_tokens for a in engine.answers.values())
    assert hits == (mode != "none")


@pytest.mark.parametrize("mix", ["full", "full+window", "window+recurrent+full", "mla"])
def test_two_steps_in_flight(mix: str) -> None:
    batch = prompts(4)
    config = settings(pipeline_depth=2, max_num_batched_tokens=24)
    serve(tiny(MIXES[mix]), config, [batch[:1], batch, batch])


def test_sampling_does_not_depend_on_company_or_preemption() -> None:
    model, batch = tiny(MIXES["full+chunked"]), prompts(4, own=12)
    params = SamplingParams(max_tokens=24, temperature=0.9, seed=5)
    engine, seen = serve(model, tight(model), [batch], params=params)
    assert seen.preemptions
    answers = [answer.token_ids for answer in engine.answers.values()]
    alone = [
        ReferenceEngine(model, settings()).generate([prompt], params)[0].token_ids
        for prompt in batch
    ]
    assert answers == alone
    sampler = Sampler(0.9, 5)
    assert alone[0] == dense_generate(model, batch[0], 24, sampler=sampler)
    other = SamplingParams(max_tokens=24, temperature=0.9, seed=6)
    assert answers != [
        a.token_ids for a in ReferenceEngine(model, settings()).generate(batch, other)
    ]


# -- kinds with rules of their own ----------------------------------------------------


@pytest.mark.parametrize("budget", [6, 64])
def test_cross_attention(budget: int) -> None:
    config = settings(
        enable_prefix_caching=False,
        max_num_encoder_input_tokens=12,
        max_num_batched_tokens=budget,
    )
    encoder = [3, 1, 4, 1, 5, 9, 2]
    model, batch = tiny((FULL, CROSS, WINDOW)), prompts(7)
    few = fewest_blocks(model, config)
    config = structs.replace(config, num_blocks=few)
    params = SamplingParams(max_tokens=30)
    engine, seen = serve(model, config, [batch], encoder=encoder, params=params)
    assert seen.preemptions
    without = ReferenceEngine(model, config).generate(
        batch, params, encoder_token_ids=[[7, 7, 7]] * 7
    )
    assert [a.token_ids for a in without] != [
        a.token_ids for a in engine.answers.values()
    ]


def test_encoder_only_layers_see_the_prompt_both_ways() -> None:
    config = settings(
        enable_prefix_caching=False,
        max_num_batched_tokens=4 * 64,
        max_num_seqs=4,
        num_blocks=17,
        scheduler_reserve_full_isl=False,
    )
    model, batch = tiny((ENCODER, FULL, ENCODER)), prompts(4)
    params = SamplingParams(max_tokens=16)
    _, seen = serve(model, config, [batch], params=params)
    assert seen.preemptions


@pytest.mark.parametrize(
    ("layer", "changes", "word"),
    [
        (CROSS, {}, "enable_prefix_caching=False"),
        (ENCODER, {"enable_prefix_caching": False}, "max_num_batched_tokens"),
        (FULL, {"backend": "FLASH"}, "EngineConfig.backend"),
        (LayerConfig(head_size_v=4), {"backend": "FLEX_ATTENTION"}, "pages"),
        (FULL, {"tensor_parallel_size": 3}, "num_heads"),
        (FULL, {"kv_cache_dtype": "float7"}, "dtype"),
        (FULL, {"layout": "XYZ"}, "layout"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    layer: LayerConfig, changes: dict[str, object], word: str
) -> None:
    with pytest.raises(ConfigError, match=word):
        ReferenceEngine(tiny((FULL, layer)), settings(**changes))


@pytest.mark.parametrize("layers", [(RECORDS, RECORDS), (RECORDS, MLA, FULL)])
def test_records_of_mla(layers: tuple[LayerConfig, ...]) -> None:
    """Records round latents to e4m3's three bits and rotary parts to bf16. Logits of
    order one are off by a few hundredths; rounded alike, the dense forward agrees."""
    batch, model = prompts(3), tiny(layers)
    rounds = [batch[:1], batch]
    serve(model, settings(), rounds, tolerance=1e-9, kv_cache_dtype="auto")
    serve(model, settings(), rounds, tolerance=RECORDS_TOLERANCE)


RECORDS_TOLERANCE = 0.2
"""The largest difference seen in these models is below half of it."""
