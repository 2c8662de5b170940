"""Between the engine and both halves of offload: what either promises the other."""

from collections import Counter
from collections.abc import Iterable, Sequence
from math import lcm
from typing import Any
from weakref import WeakSet

from kvplugin.block import NULL_BLOCK
from kvplugin.connectors.offload.messages import Plan
from kvplugin.contract import GroupInfo, Lookup, Step, WorkerOutcome
from kvplugin.wire import decode


class View:
    """A request as connectors see it: `RequestView`, hints, and no more.

    An object of its own, so that a test can tell who still remembers a request.
    """

    def __init__(self, request: Any) -> None:
        self._request = request

    @property
    def request_id(self) -> str:
        return str(self._request.request_id)

    @property
    def num_tokens(self) -> int:
        return int(self._request.num_tokens)

    @property
    def num_prompt_tokens(self) -> int:
        return int(self._request.num_prompt_tokens)

    @property
    def block_hashes(self) -> Sequence[bytes]:
        hashes: Sequence[bytes] = self._request.block_hashes
        return hashes

    @property
    def block_context(self) -> Any:
        return self._request.block_context


class Witness:
    """A scheduler half that checks another one, and what the engine tells it.

    - A lookup changes nothing, and offers what every group can end at, but never all.
    - A load fills every block that the engine set aside for it, and no other.
    - No transfer names the null block.

    Args:
        half: the one that decides.
        groups: of the engine.
    """

    def __init__(self, half: Any, groups: Sequence[GroupInfo]) -> None:
        self.half = half
        self.plans: list[Plan] = []
        """All of them, oldest first."""
        self.credited: dict[str, list[int]] = {}
        """Of each request the tokens that each of its loads was to bring."""
        self.loads: Counter[str] = Counter()
        """Loads that were ordered, by request."""
        self.views: WeakSet[View] = WeakSet()
        """Requests that somebody remembers."""
        self.reports: list[bytes] = []
        """All that came, oldest first."""
        self.may_refuse = False
        """Whether a load may be ordered that fails at once."""
        self.is_late = False
        """Whether reports are kept back until one comes after this is over."""
        self._kept: list[bytes] = []
        self._groups = groups
        self._unit = lcm(*(g.block_size for g in groups if g.reusable))
        self._local: dict[str, int] = {}
        self._due: dict[str, dict[int, list[int]]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.half, name)

    def view(self, request: Any) -> View:
        """What the half is shown."""
        view = View(request)
        self.views.add(view)
        return view

    def lookup(self, request: Any, num_local_tokens: int) -> Lookup:
        view = self.view(request)
        answer: Lookup = self.half.lookup(view, num_local_tokens)
        again = self.half.lookup(view, num_local_tokens)
        assert answer == again, "a lookup has changed the next one"
        if answer.ready and answer.tokens:
            end = num_local_tokens + answer.tokens
            assert end % self._unit == 0, f"{end} is no multiple of {self._unit}"
            assert end < view.num_tokens, "nothing is left to compute"
        self._local[view.request_id] = num_local_tokens
        return answer

    def allocated(
        self, request: Any, block_ids: tuple[Sequence[int], ...], num_external: int
    ) -> None:
        id_ = request.request_id
        if num_external:
            start = self._local[id_]
            self._due[id_] = self._wanted(block_ids, start, start + num_external)
            self.credited.setdefault(id_, []).append(num_external)
            self.loads[id_] += 1
        self.half.allocated(self.view(request), block_ids, num_external)

    def _wanted(
        self, rows: tuple[Sequence[int], ...], start: int, stop: int
    ) -> dict[int, list[int]]:
        """Blocks of the tokens [start, stop) that are there, by group."""
        wanted = {}
        for group, row in zip(self._groups, rows, strict=True):
            entries = row[start // group.block_size : stop // group.block_size]
            blocks = [block for block in entries if block != NULL_BLOCK]
            if blocks and group.reusable:
                wanted[group.index] = blocks
        return wanted

    def plan_step(self, step: Step) -> bytes:
        data: bytes = self.half.plan_step(step)
        plan = decode(data, Plan) if data else None
        if plan is not None:
            self.plans.append(plan)
            for order in plan.loads:
                found = {p.group: list(p.engine_ids) for p in order.parts}
                assert self.may_refuse or not order.refusal, order
                due = self._due.pop(order.request_id)
                assert found == due, f"{order} is to fill {due}"
            for order in (*plan.loads, *plan.stores):
                for part in order.parts:
                    assert NULL_BLOCK not in part.engine_ids, order
        assert not self._due, f"no load was ordered for {list(self._due)}"
        return data

    def apply(self, reports: Iterable[bytes]) -> None:
        reports = list(reports)
        self.reports += reports
        self._kept += reports
        if not self.is_late:
            kept, self._kept = self._kept, []
            self.half.apply(kept)

    def finished(self, request: Any) -> bool:
        self._local.pop(request.request_id, None)
        self._due.pop(request.request_id, None)
        return bool(self.half.finished(self.view(request)))


class WorkerWitness:
    """A worker half that checks another one: each load ends once, and only once.

    Args:
        half: the one that moves blocks.
        loads: see `Witness.loads`.
    """

    def __init__(self, half: Any, loads: Counter[str]) -> None:
        self.half = half
        self.ended: Counter[str] = Counter()
        self._loads = loads

    def __getattr__(self, name: str) -> Any:
        return getattr(self.half, name)

    def poll(self) -> WorkerOutcome:
        outcome: WorkerOutcome = self.half.poll()
        self.ended.update(outcome.finished_loads)
        assert self.ended <= self._loads, "the end of a load was told twice"
        assert outcome.failed_loads.keys() <= outcome.finished_loads
        return outcome

    def check_idle(self) -> None:
        """Nothing is under way any more."""
        assert self.ended == self._loads, "a load has not ended"
