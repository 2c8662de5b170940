"""Tenants share an engine: who was served less is next, who was served more gives
way."""

from collections import Counter, OrderedDict

from kvplugin import hookimpl
from kvplugin.hooks import AdmissionContext, VictimContext, WaitingContext
from kvplugin.policies.scheduling import may_lose
from kvplugin.policies.scheduling.aging import Aging
from kvplugin.request import RequestLike

MOST_TENANTS = 10_000
"""Tenants whose account is kept, those seen last."""


def tenant_of(request: RequestLike) -> str:
    """Whose request it is; "" is the public."""
    return request.cache_salt or ""


class FairShare:
    """Counts tokens that tenants were served, as the virtual token counter of Sheng et
    al. ("Fairness in serving large language models", 2024) does. A request's tokens
    count once, when it is first admitted.

    Args:
        reserve: share of the blocks that only the tenant whose turn it is may take.
        most_steps: steps that a request waits at most while others overtake it.
    """

    KVP_HOOK_API_VERSION = 1

    def __init__(self, reserve: float = 0.25, most_steps: int = 256) -> None:
        self._reserve = reserve
        self._aging = Aging(most_steps)
        self._served: OrderedDict[str, int] = OrderedDict()
        self._unpaid: dict[str, RequestLike] = {}
        """Requests that waited when the order was last asked for, and never ran."""
        self._turn: str | None = None
        """The tenant that is next."""

    @hookimpl
    def kvp_choose_waiting_order(self, ctx: WaitingContext) -> list[str]:
        self._keep_accounts(ctx.waiting)
        late, others = self._aging.overdue(ctx.waiting, ctx.step)
        round_of: Counter[str] = Counter()
        keys = {}
        for request in others:
            tenant = tenant_of(request)
            keys[request.request_id] = round_of[tenant], self._served[tenant]
            round_of[tenant] += 1
        others.sort(key=lambda request: keys[request.request_id])
        ordered = [*late, *others]
        self._turn = tenant_of(ordered[0])
        return [request.request_id for request in ordered]

    @hookimpl
    def kvp_choose_admission(self, ctx: AdmissionContext) -> bool:
        if ctx.free_blocks >= self._reserve * ctx.num_blocks:
            return True
        return tenant_of(ctx.request) == self._turn

    @hookimpl
    def kvp_choose_victim(self, ctx: VictimContext) -> str:
        # Who arrived first is safe: somebody always comes to an end.
        candidates = reversed(may_lose(ctx.candidates))
        served = self._served
        victim = max(candidates, key=lambda r: served.get(tenant_of(r), 0))
        return victim.request_id

    def _keep_accounts(self, waiting: tuple[RequestLike, ...]) -> None:
        """Who waits no longer was served (or has given up, and pays all the same). Who
        was preempted has paid."""
        now = {r.request_id: r for r in waiting if not r.num_preemptions}
        for request_id, request in self._unpaid.items():
            if request_id in now:
                continue
            tenant = tenant_of(request)
            self._served[tenant] = self._served.get(tenant, 0) + request.num_tokens
            self._served.move_to_end(tenant)
        self._unpaid = now
        tenants = {tenant_of(request) for request in waiting}
        known = [self._served[t] for t in tenants if t in self._served]
        for tenant in sorted(tenants):
            self._served.setdefault(tenant, min(known, default=0))
        while len(self._served) > max(MOST_TENANTS, len(tenants)):
            oldest, count = self._served.popitem(last=False)
            if oldest in tenants:
                self._served[oldest] = count
