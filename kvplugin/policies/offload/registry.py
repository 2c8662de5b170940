"""The core's offload policies by name; imported when one is made."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvplugin.policies.listing import make_listed
from kvplugin.policies.offload.base import OffloadPolicy


@dataclass(frozen=True, slots=True)
class Listed:
    """A policy that can be asked for by name."""

    place: str
    """Module and class, below this package; see `make_listed`."""
    description: str


OFFLOAD_POLICIES: Final[Mapping[str, Listed]] = {
    "all": Listed("admit_all.AdmitAll", "every block; the default"),
    "second_touch": Listed(
        "second_touch.SecondTouch", "blocks that a second request comes with"
    ),
    "min_depth": Listed("min_depth.MinDepth", "blocks of long prefixes only"),
}


def make_offload_policy(name: str, options: Mapping[str, object]) -> OffloadPolicy:
    """A fresh policy.

    Args:
        name: one of `OFFLOAD_POLICIES`.
        options: what the policy is told.

    Raises:
        ConfigError: an option that the policy does not know, or a wrong value.
    """
    policy: OffloadPolicy = make_listed(
        f"{__package__}.{OFFLOAD_POLICIES[name].place}",
        options,
        f"offload policy {name!r}",
        "offload_policy_options",
    )
    return policy
