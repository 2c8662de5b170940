"""A drafter with KV of its own: its proposals equal those of a dense one.

The outputs must be right whatever it proposes. Its proposals are compared, logits and
all, with a drafter that computes everything anew from the accepted tokens: a stale, a
rejected or a foreign token in its KV would change them.
"""

import random
from itertools import product
from typing import Any

import pytest
from msgspec import structs

from kvplugin.errors import ConfigError
from kvplugin.integration.reference import (
    AttentionDrafter,
    LayerConfig,
    ReferenceEngine,
    SamplingParams,
    random_draft_model,
)
from kvplugin.integration.reference.connector import offload
from tests.reference.drafting import (
    STATES,
    Checked,
    draft_and_serve,
    fewest,
    target_of,
)
from tests.reference.models import (
    FULL,
    MIXES,
    WINDOW,
    assert_empty,
    compare,
    prompts,
    serve,
    settings,
)
from tests.reference.test_offload import CONFIG, forget_local

LONG = pytest.mark.full
CASES = [
    ("full", "align"),
    ("full+window", "align"),
    (STATES, "none"),
    (STATES, "all"),
    (STATES, "align"),
    ("mla", "align"),
]
SOME_CASES = [
    ("full", FULL),
    ("full+window", WINDOW),
    (STATES, FULL),
    pytest.param("full", WINDOW, marks=LONG),
    pytest.param("full+window", FULL, marks=LONG),
    pytest.param(STATES, WINDOW, marks=LONG),
]


def tokens_of(served: ReferenceEngine) -> list[list[int]]:
    return [answer.token_ids for answer in served.answers.values()]


def group_of_drafts(served: ReferenceEngine) -> tuple[str, ...]:
    """Names of the layers in the drafter's group."""
    groups = served.plan.scheduler.kv_cache_groups
    (group,) = [group for group in groups if group.is_eagle_group]
    return group.layer_names


def _cases() -> list[Any]:
    """Mix, mode, drafts and layer; the slow ones that add little are marked."""
    cases = []
    for (mix, mode), (count, layer) in product(CASES, product((1, 3), (FULL, WINDOW))):
        late = (count, layer) in (((3, WINDOW), (1, FULL)))
        marks = [LONG] if late or (mix == STATES and count == 1) else []
        name = f"{mix}-{mode}-{count}-{layer.kind}"
        cases.append(pytest.param(mix, mode, count, layer, marks=marks, id=name))
    return cases


@pytest.mark.parametrize(("mix", "mode", "count", "layer"), _cases())
def test_outputs_and_drafts_equal_the_dense_ones(
    mix: str, mode: str, count: int, layer: LayerConfig
) -> None:
    # A hit needs two blocks, which are large where they have to hold a state.
    batch = prompts(3, common=44 if mix == STATES and mode != "none" else 22)
    target = target_of(MIXES[mix])
    rounds = [batch[:1], batch, batch]
    config = settings(num_drafts=count, mamba_cache_mode=mode, max_model_len=96)
    drafter, served, _ = draft_and_serve(target, config, rounds, layer=layer)
    assert drafter.accepted
    assert drafter.rejected
    assert not drafter.other
    hits = sum(answer.num_cached_tokens for answer in served.answers.values())
    assert bool(hits) == (mode != "none")
    plain, _ = serve(
        target,
        structs.replace(config, num_drafts=0),
        rounds,
        params=SamplingParams(max_tokens=12),
    )
    assert tokens_of(served) == tokens_of(plain)


@pytest.mark.parametrize(
    ("mix", "layer", "names"),
    [
        ("full", FULL, ("layers.0", "layers.1", "draft.0")),
        ("full", WINDOW, ("draft.0",)),
        ("full+window", FULL, ("layers.0", "draft.0")),
        (STATES, FULL, ("layers.1", "draft.0")),
        ("mla", WINDOW, ("draft.0",)),
    ],
)
def test_its_layer_is_in_the_group_of_equal_ones(
    mix: str, layer: LayerConfig, names: tuple[str, ...]
) -> None:
    target, config = target_of(MIXES[mix]), settings(num_drafts=3)
    drafter = AttentionDrafter(random_draft_model(target, layer), config)
    served = ReferenceEngine(target, config, drafter=drafter)
    assert group_of_drafts(served) == names
    assert served.config.scheduler.num_lookahead_tokens == 2


@pytest.mark.parametrize(("mix", "layer"), SOME_CASES)
def test_prompts_in_chunks(mix: str, layer: LayerConfig) -> None:
    config = settings(num_drafts=3, max_num_batched_tokens=20 if mix == STATES else 7)
    batch = prompts(4, common=9, own=17)
    drafter, _, seen = draft_and_serve(
        target_of(MIXES[mix]), config, [batch, batch[1:]], layer=layer
    )
    assert seen.chunked
    assert not drafter.other


@pytest.mark.parametrize(("mix", "layer"), SOME_CASES)
def test_preemption_and_eviction(mix: str, layer: LayerConfig) -> None:
    target = target_of(MIXES[mix])
    config = settings(num_drafts=2, scheduler_reserve_full_isl=False)
    config = structs.replace(config, num_blocks=fewest(target, config, layer))
    batch = prompts(4, common=6, own=14)
    drafter, _, seen = draft_and_serve(
        target,
        config,
        [batch, batch[::-1]],
        layer=layer,
        params=SamplingParams(max_tokens=24),
    )
    assert seen.preemptions
    assert drafter.accepted
    assert drafter.rejected
    assert not drafter.other


@pytest.mark.parametrize(
    ("layout", "depth", "ranks"),
    [
        ("NHD", 2, 2),
        ("HND", 1, 2),
        pytest.param("HND", 2, 1, marks=LONG),
        pytest.param("HND", 2, 2, marks=LONG),
        pytest.param("NHD", 1, 2, marks=LONG),
    ],
)
def test_ranks_layouts_and_steps_in_flight(layout: str, depth: int, ranks: int) -> None:
    config = settings(
        num_drafts=3,
        layout=layout,
        pipeline_depth=depth,
        tensor_parallel_size=ranks,
        max_num_batched_tokens=24,
    )
    batch = prompts(3)
    drafter, served, _ = draft_and_serve(
        target_of(MIXES["full"]), config, [batch, batch], layer=WINDOW
    )
    assert drafter.accepted
    assert drafter.rejected
    assert not drafter.other
    assert list(served.answers.values())[-1].num_cached_tokens


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ("NHD", 1),
        ("HND", 2),
        pytest.param("HND", 1, marks=LONG),
        pytest.param("NHD", 2, marks=LONG),
    ],
)
def test_its_kv_comes_back_from_host_memory(layout: str, ranks: int) -> None:
    batch = prompts(3)
    config = settings(num_drafts=3, layout=layout, tensor_parallel_size=ranks)
    drafter, served, _ = draft_and_serve(
        target_of(MIXES["full"]),
        config,
        [batch, batch],
        connector=offload(CONFIG),
        between=forget_local,
    )
    hits = [answer.num_cached_tokens for answer in served.answers.values()]
    assert hits == [0, 8, 8, 16, 16, 16]  # one block less than without a drafter
    assert not drafter.other


def test_kernel_blocks_smaller_than_those_of_the_manager() -> None:
    config = settings(
        num_drafts=3,
        backend="FLASH_ATTN",
        block_size=32,
        kernel_block_size=16,
        max_model_len=160,
    )
    batch = prompts(3, common=70)
    drafter, served, _ = draft_and_serve(
        target_of(MIXES["full"]), config, [batch, batch]
    )
    assert list(served.answers.values())[-1].num_cached_tokens == 32
    assert not drafter.other


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_up_to_the_longest_request(temperature: float) -> None:
    """No draft is made, and no KV left, where the request may not grow."""
    params = SamplingParams(max_tokens=19, temperature=temperature, seed=3)
    config = settings(num_drafts=3, max_model_len=40)
    drafter, _, _ = draft_and_serve(
        target_of(MIXES["full"]), config, [prompts(1)], params=params
    )
    assert drafter.accepted
    assert drafter.rejected
    assert drafter.cut_short
    assert not drafter.other


def test_other_layers_are_refused() -> None:
    for layer in (LayerConfig(kind="chunked_local", chunk=8), LayerConfig(shares=0)):
        with pytest.raises(ConfigError, match="full or sliding_window"):
            random_draft_model(target_of(MIXES["full"]), layer)


# -- everything together ---------------------------------------------------------------


@pytest.mark.parametrize(
    "seed",
    [*range(2), *(pytest.param(n, marks=LONG) for n in range(2, 40))],
)
def test_random_requests(seed: int) -> None:
    """Arrivals, aborts, resets and pressure. Requests that begin alike go on alike, so
    that no hit is joined of blocks with other continuations."""
    rng = random.Random(seed)
    target = target_of(MIXES[rng.choice(["full", "full+window", STATES, "mla"])], seed)
    config = settings(
        num_drafts=rng.choice([1, 2, 3]),
        layout=rng.choice(["NHD", "HND"]),
        tensor_parallel_size=rng.choice([1, 2]),
        mamba_cache_mode=rng.choice(["none", "align", "all"]),
        max_num_batched_tokens=rng.choice([24, 32, 80]),
        max_num_seqs=rng.choice([2, 4]),
        pipeline_depth=rng.choice([1, 2]),
    )
    layer = rng.choice([FULL, WINDOW])
    blocks = fewest(target, config, layer) + rng.choice([0, 4, 20])
    config = structs.replace(config, num_blocks=blocks)
    drafter = Checked(target, random_draft_model(target, layer), config)
    served = ReferenceEngine(target, config, drafter=drafter)
    heads = [[rng.randrange(61) for _ in range(rng.randrange(1, 30))] for _ in "abcd"]
    temperature = rng.choice([0.0, 0.5])
    asked: dict[str, tuple[list[int], SamplingParams]] = {}
    left = 10
    while served.has_work() or left:
        if left and rng.random() < 0.4:
            left -= 1
            prompt, longest = rng.choice(heads), rng.randrange(1, 30)
            params = SamplingParams(max_tokens=longest, temperature=temperature, seed=7)
            asked[served.add_request(prompt, params)] = prompt, params
        if asked and rng.random() < 0.03:
            served.abort(rng.choice(sorted(asked)))
        if rng.random() < 0.02:
            served.reset_prefix_cache()
        served.step()
        served.check()
    for req_id, (prompt, params) in asked.items():
        answer = served.answers[req_id]
        if answer.finish_reason == "length":
            compare(target, prompt, answer, params=params)
    assert_empty(served)
    drafter.compare()
    assert drafter.same
    assert not drafter.other
