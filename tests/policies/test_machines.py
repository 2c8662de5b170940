"""Whatever a policy chooses, requests read what they wrote: under the manager's state
machine, and in a scheduler that has too little room."""

from functools import partial

import pytest

from kvplugin.hooks import EvictionPolicyContext, Hooks
from kvplugin.policies.eviction import EvictionPolicy
from kvplugin.policies.eviction.registry import POLICIES
from tests.core import test_manager_machine as machine
from tests.core.manager_setups import PolicyPlugin
from tests.scheduler import test_random_runs as pressed

ANY = [*POLICIES, "retention+queue+reuse"]


def make(name: str) -> EvictionPolicy:
    return Hooks.of().make_eviction_policy(
        EvictionPolicyContext(name=name, num_blocks=40)
    )


@pytest.mark.parametrize("policy", ANY)
def test_manager_does_what_the_model_does(policy: str) -> None:
    for setup in ("full, two windows", "full, states"):
        machine.run(machine.SETUPS[setup], partial(make, policy), examples=6, steps=30)


@pytest.mark.full
@pytest.mark.parametrize("setup", machine.SETUPS)
@pytest.mark.parametrize("policy", ANY)
def test_manager_does_what_the_model_does_for_long(policy: str, setup: str) -> None:
    machine.run(machine.SETUPS[setup], partial(make, policy), examples=60, steps=50)


@pytest.mark.parametrize("policy", ANY)
def test_scheduler_reads_what_was_written(policy: str) -> None:
    """The laboratory raises if the policy has to be replaced."""
    for seed, mix in enumerate(("full", "full+window", "full+states")):
        hooks = Hooks.of(PolicyPlugin(make(policy)))
        pressed.run(mix, seed, depth=1 + seed % 2, synchronous=False, hooks=hooks)


@pytest.mark.full
@pytest.mark.parametrize("mix", pressed.MIXES)
@pytest.mark.parametrize("policy", ANY)
def test_scheduler_reads_what_was_written_for_long(policy: str, mix: str) -> None:
    for seed in range(12):
        hooks = Hooks.of(PolicyPlugin(make(policy)))
        drafts = pressed.DRAFTS if seed % 3 == 0 else 0
        pressed.run(
            mix, seed, depth=1 + seed % 2, synchronous=False, drafts=drafts, hooks=hooks
        )
