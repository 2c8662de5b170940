"""A plugin whose eviction policy goes wrong after a while."""

from collections.abc import Mapping

from kvplugin import hookimpl
from kvplugin.hooks import EvictionPolicyContext
from kvplugin.policies.eviction import LRU


class Misbehaving(LRU):
    """Offers blocks twice from its third choice on."""

    def __init__(self) -> None:
        super().__init__()
        self._choices = 0

    def victims(self, n: int) -> list[int]:
        self._choices += 1
        victims = super().victims(n)
        return victims if self._choices < 3 else victims[:1] * n + victims[:1]


@hookimpl
def kvp_register_eviction_policies() -> Mapping[str, str]:
    return {"misbehaving": "goes wrong"}


@hookimpl
def kvp_make_eviction_policy(ctx: EvictionPolicyContext) -> Misbehaving | None:
    return Misbehaving() if ctx.name == "misbehaving" else None
