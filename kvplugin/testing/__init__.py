"""The fault laboratory: what authors of connectors, policies and engines test with.

Importing this package imports nothing else; names come from their modules when asked
for, by `import *` too. Its parts: `lab` (all of it around a scheduler), `transport`,
`faults`, `remote` and `peers` (transfers), `content` and `pool_watch` (whose bytes a
block holds), `toy_model` (a worker that notices every wrong byte), `orders` (every
interleaving), `oracles`, `progress`, `estimates` and `policy_watch` (what must hold).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kvplugin.testing.content import (
        ContentModel as ContentModel,
    )
    from kvplugin.testing.estimates import (
        assert_estimate as assert_estimate,
    )
    from kvplugin.testing.estimates import (
        brute_force_blocks as brute_force_blocks,
    )
    from kvplugin.testing.faults import (
        COMPLETES as COMPLETES,
    )
    from kvplugin.testing.faults import (
        FAILS as FAILS,
    )
    from kvplugin.testing.faults import (
        LATE as LATE,
    )
    from kvplugin.testing.faults import (
        NEVER_ENDS as NEVER_ENDS,
    )
    from kvplugin.testing.faults import (
        REPORTED_LATE as REPORTED_LATE,
    )
    from kvplugin.testing.faults import (
        TORN as TORN,
    )
    from kvplugin.testing.faults import (
        TWICE as TWICE,
    )
    from kvplugin.testing.faults import (
        ContentTier as ContentTier,
    )
    from kvplugin.testing.faults import (
        Fate as Fate,
    )
    from kvplugin.testing.faults import (
        FaultyTransport as FaultyTransport,
    )
    from kvplugin.testing.lab import (
        Lab as Lab,
    )
    from kvplugin.testing.oracles import (
        CounterWatch as CounterWatch,
    )
    from kvplugin.testing.oracles import (
        EventReplay as EventReplay,
    )
    from kvplugin.testing.oracles import (
        assert_balanced as assert_balanced,
    )
    from kvplugin.testing.oracles import (
        assert_cache_content as assert_cache_content,
    )
    from kvplugin.testing.oracles import (
        assert_equivalent as assert_equivalent,
    )
    from kvplugin.testing.oracles import (
        assert_poisoned as assert_poisoned,
    )
    from kvplugin.testing.orders import (
        Action as Action,
    )
    from kvplugin.testing.orders import (
        Exploration as Exploration,
    )
    from kvplugin.testing.orders import (
        OrderError as OrderError,
    )
    from kvplugin.testing.orders import (
        explore as explore,
    )
    from kvplugin.testing.orders import (
        run_order as run_order,
    )
    from kvplugin.testing.peers import (
        PeerKV as PeerKV,
    )
    from kvplugin.testing.peers import (
        PeerLab as PeerLab,
    )
    from kvplugin.testing.peers import (
        PeerWorker as PeerWorker,
    )
    from kvplugin.testing.policy_watch import (
        PolicyError as PolicyError,
    )
    from kvplugin.testing.policy_watch import (
        strict_policies as strict_policies,
    )
    from kvplugin.testing.policy_watch import (
        watch_policy as watch_policy,
    )
    from kvplugin.testing.pool_watch import (
        watch_pool as watch_pool,
    )
    from kvplugin.testing.pool_watch import (
        watched_content as watched_content,
    )
    from kvplugin.testing.progress import (
        ProgressWatch as ProgressWatch,
    )
    from kvplugin.testing.remote import (
        RemoteKV as RemoteKV,
    )
    from kvplugin.testing.remote import (
        RemoteWorker as RemoteWorker,
    )
    from kvplugin.testing.rules import (
        GroupModel as GroupModel,
    )
    from kvplugin.testing.rules import (
        Identity as Identity,
    )
    from kvplugin.testing.rules import (
        group_models as group_models,
    )
    from kvplugin.testing.rules import (
        identity_of_request as identity_of_request,
    )
    from kvplugin.testing.slots import (
        ContentError as ContentError,
    )
    from kvplugin.testing.slots import (
        Row as Row,
    )
    from kvplugin.testing.slots import (
        Void as Void,
    )
    from kvplugin.testing.toy_model import (
        ToyModel as ToyModel,
    )
    from kvplugin.testing.toy_reference import (
        reference as reference,
    )
    from kvplugin.testing.transport import (
        FakeTransport as FakeTransport,
    )

_EXPORTS: Final[dict[str, tuple[str, ...]]] = {
    "content": ("ContentModel",),
    "estimates": ("assert_estimate", "brute_force_blocks"),
    "faults": (
        "COMPLETES",
        "FAILS",
        "LATE",
        "NEVER_ENDS",
        "REPORTED_LATE",
        "TORN",
        "TWICE",
        "ContentTier",
        "Fate",
        "FaultyTransport",
    ),
    "lab": ("Lab",),
    "oracles": (
        "CounterWatch",
        "EventReplay",
        "assert_balanced",
        "assert_cache_content",
        "assert_equivalent",
        "assert_poisoned",
    ),
    "orders": ("Action", "Exploration", "OrderError", "explore", "run_order"),
    "peers": ("PeerKV", "PeerLab", "PeerWorker"),
    "policy_watch": ("PolicyError", "strict_policies", "watch_policy"),
    "pool_watch": ("watch_pool", "watched_content"),
    "progress": ("ProgressWatch",),
    "remote": ("RemoteKV", "RemoteWorker"),
    "rules": ("GroupModel", "Identity", "group_models", "identity_of_request"),
    "slots": ("ContentError", "Row", "Void"),
    "toy_model": ("ToyModel",),
    "toy_reference": ("reference",),
    "transport": ("FakeTransport",),
}
_MODULE_OF: Final = {
    name: module for module, names in _EXPORTS.items() for name in names
}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    """Import what is asked for."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{_MODULE_OF[name]}")
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
