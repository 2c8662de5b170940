"""Victims of preemption other than the last one.

Somebody must be safe until it ends, or requests could take turns at losing what they
have computed: see each policy for who.
"""

from kvplugin.hooks import VictimContext, hookimpl


class LeastWork:
    """Who has computed the fewest tokens loses least; of equals the last one. Safe is
    who has computed most."""

    @hookimpl
    def kvp_choose_victim(self, ctx: VictimContext) -> str:
        """The victim."""
        candidates = reversed(ctx.candidates)
        return min(candidates, key=lambda r: r.num_computed_tokens).request_id


class MostBlocks:
    """Whose blocks make most room, so that few lose theirs; of equals the last one.
    Safe is who was admitted first."""

    @hookimpl
    def kvp_choose_victim(self, ctx: VictimContext) -> str:
        """The victim."""
        candidates = ctx.candidates[1:] or ctx.candidates
        return max(reversed(candidates), key=ctx.freed_blocks).request_id
