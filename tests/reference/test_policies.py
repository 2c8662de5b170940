"""Any eviction policy leaves the answers as they are: it chooses among free blocks."""

import pytest
from msgspec import structs

from kvplugin.integration.reference import SamplingParams
from kvplugin.policies.eviction.registry import POLICIES
from tests.reference.models import MIXES, prompts, serve, tight, tiny

PROTECTED = "retention+queue+reuse"


@pytest.mark.parametrize("mix", ["full", "full+window", "window+recurrent+full"])
@pytest.mark.parametrize("policy", [*POLICIES, PROTECTED])
def test_answers_are_those_without_a_cache(policy: str, mix: str) -> None:
    """Under pressure: prefixes are shared, evicted and found again."""
    model = tiny(MIXES[mix])
    config = structs.replace(tight(model), eviction_policy=policy)
    batch = prompts(5, common=6, own=14)
    params = SamplingParams(max_tokens=24)
    engine, _ = serve(model, config, [batch, batch[::-1]], params=params)
    pool = engine.manager.block_pool
    pool.check()
    assert not pool.policy_failures
