"""A batch's rows are what a dict of requests would be, whatever a scheduler sends."""

from collections.abc import Collection
from dataclasses import dataclass, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvplugin.errors import CapacityError, IntegrityError
from kvplugin.scheduler import SchedulerOutput
from kvplugin.scheduler.output import CachedRequestData, NewRequestData
from kvplugin.worker.batch import StepBatch, WorkerBatch
from tests.worker.naive import kernel_blocks, table_of

ROWS, WIDTH, RATIO = 5, 8, 2


@dataclass
class Known:
    """A request as the scheduler sees it."""

    ids: list[int]
    tokens: list[int]
    computed: int


def new(name: str, known: Known) -> NewRequestData:
    return NewRequestData(name, known.tokens, (known.ids, known.ids), known.computed)


def resumed(name: str, known: Known) -> CachedRequestData:
    ids = (known.ids, known.ids)
    return CachedRequestData(
        name, ids, known.computed, resumed=True, token_ids=known.tokens
    )


class Steps(RuleBasedStateMachine):
    """A scheduler without a plan, and the worker's batch beside a dict."""

    @initialize()
    def start(self) -> None:
        tables = table_of(
            4, max_model_len=4 * WIDTH, ratio=RATIO, max_num_reqs=ROWS, groups=2
        )
        self.batch = WorkerBatch(tables)
        self.running: dict[str, Known] = {}
        self.preempted: dict[str, Known] = {}
        self.gone: set[str] = set()
        self.lost: set[str] = set()
        self.born = self.step = self.block = 0

    def blocks(self, count: int) -> list[int]:
        self.block += count
        return list(range(self.block - count + 1, self.block + 1))

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from([self.running, self.preempted]))
        if place:
            name = data.draw(st.sampled_from(sorted(place)))
            del place[name]
            self.gone.add(name)

    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        if self.running:
            name = data.draw(st.sampled_from(sorted(self.running)))
            self.preempted[name] = self.running.pop(name)
            self.lost.add(name)

    @rule(data=st.data())
    def run_a_step(self, data: st.DataObject) -> None:
        self.step += 1
        output = SchedulerOutput(self.step)
        known = self.some(data, self.running)
        cached = [self.go_on(name, data) for name in known]
        back = self.some(data, self.preempted)
        for name in back[: ROWS - len(self.running)]:
            if data.draw(st.booleans()):
                self.lost.discard(name)  # it comes back before its loss is told
            self.running[name] = self.preempted.pop(name)
            self.running[name].ids = self.blocks(data.draw(st.integers(1, 3)))
            self.running[name].tokens += [self.step]
            self.running[name].computed = 0
            cached.append(resumed(name, self.running[name]))
        arrivals = []
        for _ in range(data.draw(st.integers(0, ROWS - len(self.running)))):
            self.born += 1
            request = Known(self.blocks(data.draw(st.integers(1, 3))), [self.born], 2)
            self.running[f"r{self.born}"] = request
            arrivals.append(new(f"r{self.born}", request))
        names = [item.req_id for item in (*cached, *arrivals)]
        names = data.draw(st.permutations(names))
        output = replace(
            output,
            scheduled_new_reqs=arrivals,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens={name: 1 + i for i, name in enumerate(names)},
            preempted_req_ids=frozenset(self.lost),
            finished_req_ids=frozenset(self.gone),
        )
        self.gone, self.lost = set(), set()
        self.check_step(self.batch.apply(output), output)

    def some(self, data: st.DataObject, where: Collection[str]) -> list[str]:
        return (
            data.draw(st.lists(st.sampled_from(sorted(where)), unique=True))
            if (where)
            else []
        )

    def go_on(self, name: str, data: st.DataObject) -> CachedRequestData:
        known = self.running[name]
        count = data.draw(st.integers(0, WIDTH - len(known.ids)))
        ids = self.blocks(count)
        known.ids = known.ids + ids
        known.computed += 1
        return CachedRequestData(name, (ids, ids) if ids else None, known.computed)

    def check_step(self, step: StepBatch, output: SchedulerOutput) -> None:
        names = [request.req_id for request in step.requests]
        assert sorted(names) == sorted(output.num_scheduled_tokens)
        for row, name in enumerate(names):
            assert self.batch.row(name) == row
            assert step.num_scheduled[row] == output.num_scheduled_tokens[name]
            assert step.num_computed[row] == self.running[name].computed

    @invariant()
    def rows_are_right(self) -> None:
        """Of all requests that the worker has heard of and not lost."""
        self.batch.check()
        for name, known in self.running.items():
            row = self.batch.row(name)
            for table in self.batch.tables.tables:
                assert table.row(row) == kernel_blocks(known.ids, RATIO)
            assert self.batch.requests[row].token_ids == known.tokens
        told = set(self.running) | self.gone | self.lost
        assert {request.req_id for request in self.batch.requests} <= told


TestSteps = Steps.TestCase
TestSteps.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def arrival(name: str, block: int = 1) -> NewRequestData:
    return NewRequestData(name, [1, 2], ([block],), 0)


def test_more_requests_than_rows() -> None:
    batch = WorkerBatch(table_of(4, max_num_reqs=1))
    with pytest.raises(CapacityError, match=r"b is one more .* max_num_seqs"):
        batch.apply(SchedulerOutput(1, [arrival("a"), arrival("b")]))


def test_requests_that_nobody_told_of() -> None:
    batch = WorkerBatch(table_of(4))
    unknown = CachedRequestData("x", None, 3)
    with pytest.raises(IntegrityError, match="x continues but has no row"):
        batch.apply(SchedulerOutput(1, scheduled_cached_reqs=[unknown]))
    with pytest.raises(IntegrityError, match=r"\['y'\] have no row"):
        batch.apply(SchedulerOutput(1, num_scheduled_tokens={"y": 1}))
    bare = replace(unknown, resumed=True)
    with pytest.raises(IntegrityError, match="x resumes without its blocks"):
        batch.apply(SchedulerOutput(1, scheduled_cached_reqs=[bare]))


def test_a_request_that_resumes_in_its_row_keeps_it() -> None:
    batch = WorkerBatch(table_of(4))
    both = {"a": 1, "b": 1}
    batch.apply(
        SchedulerOutput(1, [arrival("a"), arrival("b", 2)], num_scheduled_tokens=both)
    )
    again = CachedRequestData("a", ([8, 9],), 0, resumed=True, token_ids=[1, 2, 3])
    batch.apply(
        SchedulerOutput(2, scheduled_cached_reqs=[again], num_scheduled_tokens={"a": 1})
    )
    assert (batch.row("a"), batch.row("b")) == (0, 1)
    assert batch.tables.tables[0].row(0) == [8, 9]
    assert batch.requests[0].token_ids == [1, 2, 3]
    assert "a" in batch
    assert "z" not in batch


def test_only_rows_that_must_move_do() -> None:
    batch = WorkerBatch(table_of(4, max_num_reqs=4))
    names = ["a", "b", "c", "d"]
    batch.apply(
        SchedulerOutput(
            1,
            [arrival(name, i) for i, name in enumerate(names, 1)],
            num_scheduled_tokens=dict.fromkeys(names, 1),
        )
    )
    going_on = [CachedRequestData(name, None, 1) for name in ("d", "b")]
    step = batch.apply(
        SchedulerOutput(
            2, scheduled_cached_reqs=going_on, num_scheduled_tokens={"d": 1, "b": 1}
        )
    )
    assert [request.req_id for request in step.requests] == ["d", "b"]
    assert [request.req_id for request in batch.requests] == ["d", "b", "c", "a"]
    assert [batch.tables.tables[0].row(row) for row in range(4)] == [[4], [2], [3], [1]]


def test_every_rank_comes_to_the_same_order() -> None:
    """Sets of names are in another order in every process."""
    names = [f"r{i}" for i in range(12)]
    at_once, one_by_one = (WorkerBatch(table_of(4, max_num_reqs=12)) for _ in range(2))
    for batch in (at_once, one_by_one):
        batch.apply(SchedulerOutput(1, [arrival(name) for name in names]))
    gone = ("r0", "r1", "r2", "r3", "r4", "r5")
    at_once.apply(SchedulerOutput(2, finished_req_ids=frozenset(gone)))
    for name in gone:
        one_by_one.apply(SchedulerOutput(2, finished_req_ids=frozenset({name})))
    left = [request.req_id for request in at_once.requests]
    assert left == [request.req_id for request in one_by_one.requests]


def test_check_finds_rows_of_nobody() -> None:
    batch = WorkerBatch(table_of(4))
    batch.tables.append(1, [[5]])
    with pytest.raises(IntegrityError, match="no request have blocks in group 0"):
        batch.check()
    batch.requests.append(arrival("a"))  # type: ignore[arg-type]
    with pytest.raises(IntegrityError, match=r"rows {} hold {'a': 0}"):
        batch.check()
