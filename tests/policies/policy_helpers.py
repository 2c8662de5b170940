"""Every registered eviction policy, for tests that hold for all of them."""

from functools import reduce

from kvplugin.policies.eviction import EvictionPolicy
from kvplugin.policies.eviction.registry import POLICIES, make_policy

NAMES = [*POLICIES, "retention+queue+arc"]
"""All single policies, and some that protect before another one ranks."""


def make(name: str) -> EvictionPolicy:
    """A fresh policy with its default settings, not bound yet."""
    *outer, last = name.split("+")
    return reduce(
        lambda inner, part: make_policy(part, {}, inner),
        reversed(outer),
        make_policy(last, {}),
    )
