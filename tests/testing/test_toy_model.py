"""The toy model over the real manager gives what its reference gives."""

import random

import pytest

from kvplugin.request import Adapter, MediaItem, MediaRange
from kvplugin.spec import KVCacheSpec
from kvplugin.testing import (
    EventReplay,
    assert_balanced,
    assert_cache_content,
    assert_equivalent,
    assert_poisoned,
)
from tests.core.manager_setups import chunk, cross, full, mamba, mla, window
from tests.testing.driver import MAX_LEN, Driver

GROUPS: dict[str, tuple[int, tuple[KVCacheSpec, ...]]] = {
    "full": (14, (full(),)),
    "latent and window": (22, (mla(), window(6, 2))),
    "chunk and full": (20, (chunk(8), full())),
    "chunks inside blocks": (8, (chunk(6),)),
    "full, window, state": (30, (full(), window(5), mamba("all"))),
}
"""Usable blocks, about one and a half requests, and specs."""
ALIGNED: dict[str, tuple[KVCacheSpec, ...]] = {
    "aligned state": (mamba("align", 4),),
    "full and aligned state": (full(4), mamba("align", 8)),
}


def prompts(seed: int, count: int) -> list[list[int]]:
    """Some begin alike."""
    rng = random.Random(seed)
    stem = [rng.randrange(100) for _ in range(40)]
    return [
        stem[: rng.randrange(30)] + [rng.randrange(100) for _ in range(1 + i % 9)]
        for i in range(count)
    ]


def drive(driver: Driver, seed: int, count: int = 8) -> None:
    """Run a random set of requests, and judge it by every oracle that applies."""
    for i, prompt in enumerate(prompts(seed, count)):
        driver.add(prompt, 4 + 3 * (i % 4))
    driver.run()
    driver.step()
    judge(driver)


def judge(driver: Driver) -> None:
    assert_equivalent(driver.outputs, driver.expected())
    assert_balanced(driver.kv, worker=driver.model.tracked, steps=driver.model)
    assert_poisoned(driver.memory, driver.kv.block_pool)
    assert_cache_content(driver.memory, driver.kv, driver.requests.values())
    replay = EventReplay()
    replay.feed(driver.kv.take_events())
    replay.assert_matches(driver.kv.block_pool, len(driver.memory.groups))


@pytest.mark.parametrize(("usable", "groups"), GROUPS.values(), ids=GROUPS)
def test_under_memory_pressure(usable: int, groups: tuple[KVCacheSpec, ...]) -> None:
    num_preemptions = 0
    for seed in range(6):
        driver = Driver(groups, 1 + usable)
        drive(driver, seed)
        num_preemptions += driver.num_preemptions
    assert num_preemptions


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("groups", ALIGNED.values(), ids=ALIGNED)
def test_aligned_states(groups: tuple[KVCacheSpec, ...], seed: int) -> None:
    unit = max(spec.block_size for spec in groups)
    drive(Driver(groups, 1 + 14 * len(groups), unit=unit), seed)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("groups", "unit"),
    [
        ((full(), window(6)), 1),
        ((chunk(8), full()), 1),
        ((full(), mamba("align", 8, drafts=3)), 8),
        ((full(), mamba("all", 4, drafts=3)), 1),
        ((mamba("align", 4, drafts=2),), 4),
    ],
)
def test_drafts(groups: tuple[KVCacheSpec, ...], unit: int, seed: int) -> None:
    states = [getattr(s, "num_speculative_blocks", 0) for s in groups]
    drafts = max(states) or 3
    driver = Driver(groups, 1 + 30 * len(groups), unit=unit, drafts=drafts)
    drive(driver, seed)
    assert driver.num_accepted


@pytest.mark.parametrize("seed", range(3))
def test_a_draft_model_scribbles_behind_the_settled_tokens(seed: int) -> None:
    drive(Driver((full(), window(6)), 61, drafts=2, lookahead=3), seed)


@pytest.mark.parametrize(
    "groups", [(mamba("none", MAX_LEN, drafts=2),), (full(), cross())]
)
def test_without_a_cache(groups: tuple[KVCacheSpec, ...]) -> None:
    driver = Driver(groups, 60, caching=False, drafts=2)
    drive(driver, 1, 4)


def test_identities_share_nothing_and_outputs_differ() -> None:
    driver = Driver((full(),), 60)
    picture = MediaItem("cat", MediaRange(6, 2))
    other = MediaItem("dog", MediaRange(6, 2))
    prompt = list(range(20))
    for kwargs in (
        {},
        {"cache_salt": "a"},
        {"lora_request": Adapter("a")},
        {"lora_request": Adapter("a", epoch=1)},
        {"mm_features": [picture]},
        {"mm_features": [other]},
    ):
        driver.add(prompt, 4, **kwargs)
        driver.run()
    driver.step()
    judge(driver)
    assert len({tuple(tokens) for tokens in driver.outputs.values()}) == 6


def test_a_wrong_read_changes_the_output() -> None:
    """Without the error, the equivalence oracle is the one that tells."""
    driver = Driver((full(), window(6)), 40, strict=False)
    request = driver.add(list(range(10)), 6)
    driver.step()
    driver.memory.poison(driver.kv.get_block_ids(request.request_id)[0][:1])
    driver.run()
    with pytest.raises(AssertionError, match="output token 1 is"):
        assert_equivalent(driver.outputs, driver.expected())
