"""Scheduling policies by kind and name; imported when one is made."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Final, Literal

from kvplugin.errors import check_choice, unknown_name
from kvplugin.policies.listing import make_listed, refuse_options

SchedulingKind = Literal["waiting_order", "admission", "victim", "checkpoints"]
"""The hook `kvp_choose_<kind>` that a policy answers, and the setting that names it."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A policy that can be asked for by name."""

    description: str
    place: str = ""
    """Module and class, below this package; see `make_listed`. Empty: what the
    scheduler does by itself."""


SCHEDULING: Final[Mapping[SchedulingKind, Mapping[str, Listed]]] = {
    "waiting_order": {
        "configured": Listed("the scheduler's own, fcfs or priority; the default"),
        "cached_first": Listed(
            "longest cached share of its prompt first", "waiting_order.CachedFirst"
        ),
        "shortest_first": Listed(
            "fewest tokens left to compute first", "waiting_order.ShortestFirst"
        ),
    },
    "admission": {
        "open": Listed("whoever fits; the default"),
        "free_share": Listed(
            "only while a share of the blocks is free", "admission.FreeShare"
        ),
    },
    "victim": {
        "last": Listed("last in the scheduler's own order; the default"),
        "least_work": Listed("fewest computed tokens", "victim.LeastWork"),
        "most_blocks": Listed("frees most blocks", "victim.MostBlocks"),
    },
    "checkpoints": {
        "all": Listed("every boundary; the default"),
        "ends": Listed("end of the prompt, ends of its chunks", "checkpoints.Ends"),
        "spaced": Listed(
            "every k-th boundary, last of the prompt", "checkpoints.Spaced"
        ),
    },
}


def make_scheduling(
    kind: SchedulingKind, name: str, options: Mapping[str, object] | None = None
) -> object:
    """A plugin for `kvplugin.hooks.hooks_with` or `Hooks.of`, named ``<kind>=<name>``.

    It remembers what it saw: one scheduler, one plugin. That of a default implements
    no hook, so that nobody is asked.

    Args:
        kind: which decision.
        name: one of `SCHEDULING[kind]`.
        options: what the policy is told, as in the setting `<kind>_options`.

    Raises:
        ConfigError: no such policy, or an option that it does not know or cannot take.
    """
    options = {} if options is None else options
    check_choice(kind, name, options)
    known = SCHEDULING.get(kind)
    if known is None:
        raise unknown_name("kind", kind, SCHEDULING, "scheduling")
    if name not in known:
        raise unknown_name("scheduling policy", name, known, kind)
    place, title = known[name].place, f"{kind} policy {name!r}"
    setting, plugin_name = f"{kind}_options", f"{kind}={name}"
    if not place:
        refuse_options(options, title, setting)
        return SimpleNamespace(__name__=plugin_name)
    plugin = make_listed(f"{__package__}.{place}", options, title, setting)
    plugin.__name__ = plugin_name
    return plugin
