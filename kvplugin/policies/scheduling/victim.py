"""Victims of preemption other than the last one. Who arrived first is safe: see
`may_lose`."""

from kvplugin.hooks import VictimContext, hookimpl
from kvplugin.policies.scheduling.sparing import may_lose


class LeastWork:
    """Who has computed the fewest tokens loses least; of equals the last one."""

    @hookimpl
    def kvp_choose_victim(self, ctx: VictimContext) -> str:
        """The victim."""
        candidates = reversed(may_lose(ctx.candidates))
        return min(candidates, key=lambda r: r.num_computed_tokens).request_id


class MostBlocks:
    """Whose blocks make most room, so that few lose theirs; of equals the last one."""

    @hookimpl
    def kvp_choose_victim(self, ctx: VictimContext) -> str:
        """The victim."""
        candidates = reversed(may_lose(ctx.candidates))
        return max(candidates, key=ctx.freed_blocks).request_id
