"""The memory of second_touch forgets tails before heads."""

import pytest

from kvplugin.policies.offload import OffloadContext
from kvplugin.policies.offload.second_touch import SecondTouch, SecondTouchOptions


@pytest.fixture
def policy() -> SecondTouch:
    return SecondTouch(SecondTouchOptions(memory=100))


def wanted(policy: SecondTouch, request: str, prompt: str, chunks: int) -> list[bool]:
    keys = [f"{prompt} {number}".encode() for number in range(chunks)]
    ctx = OffloadContext(request_id=request, block_tokens=16, prefix_tokens=16 * chunks)
    return [*policy.admit(keys, ctx)]


def test_a_prompt_beyond_its_memory_is_stored_as_far_as_that_goes(
    policy: SecondTouch,
) -> None:
    assert not any(wanted(policy, "r1", "long", 101))
    assert wanted(policy, "r2", "long", 101) == [True] * 100 + [False]


def test_other_prompts_take_its_tail_from_its_memory(policy: SecondTouch) -> None:
    wanted(policy, "r1", "long", 60)
    wanted(policy, "r2", "other", 45)
    assert wanted(policy, "r3", "long", 60) == [True] * 55 + [False] * 5
