"""A step that cannot be is refused before anything is changed."""

from typing import Any

import pytest

from kvplugin.errors import CapacityError, IntegrityError
from kvplugin.scheduler import SchedulerOutput
from kvplugin.scheduler.output import CachedRequestData, NewRequestData
from kvplugin.worker.batch import WorkerBatch
from kvplugin.worker.block_table import BlockTables
from kvplugin.worker.table_shape import table_shape
from tests.scheduler.harness import full, window
from tests.worker.naive import limits


def state_of(batch: WorkerBatch) -> Any:
    """All that a step may change."""
    return (
        [(r.req_id, list(r.token_ids), r.num_computed_tokens) for r in batch.requests],
        {r.req_id: batch.row(r.req_id) for r in batch.requests},
        [
            (table.blocks.array.tolist(), [table.row(r) for r in range(4)])
            for table in batch.tables.tables
        ],
    )


def cached(name: str, *ids: int, computed: int = 31) -> CachedRequestData:
    return CachedRequestData(name, (list(ids), list(ids)) if ids else None, computed)


@pytest.mark.parametrize(
    ("step", "error", "words"),
    [
        ({"new": ["d", "e", "f"]}, CapacityError, "f is one more than the 4 rows"),
        (
            {"cached": [cached("b", *range(1, 9))]},
            CapacityError,
            "request b would have",
        ),
        (
            {"cached": [cached("b", -3)]},
            CapacityError,
            "block ids -3 to -3 of request b",
        ),
        ({"cached": [cached("x", 5)]}, IntegrityError, "x continues but has no row"),
        ({"cached": [cached("c", 5)]}, IntegrityError, "c continues but has no row"),
        ({"cached": [cached("b", 5)] * 2}, IntegrityError, r"\['b'\] come twice"),
        ({"cached": [cached("b", computed=1)]}, IntegrityError, "b goes back from 30"),
        (
            {"cached": [CachedRequestData("b", ([1],), 31)]},
            ValueError,
            "1 lists of ids",
        ),
        ({"scheduled": ["x"]}, IntegrityError, "have no row"),
        ({"scheduled": ["c"]}, IntegrityError, "have no row"),
    ],
)
def test_a_step_that_is_refused_changes_nothing(
    step: dict[str, Any], error: type[Exception], words: str
) -> None:
    shapes = [table_shape(spec, limits(32)) for spec in (full(), window(6))]
    batch = WorkerBatch(BlockTables(shapes, max_num_reqs=4, max_model_len=32))

    def arrives(name: str, block: int, computed: int = 0) -> NewRequestData:
        return NewRequestData(name, [1, 2], ([block], [block + 1]), computed)

    first = {"a": arrives("a", 1), "b": arrives("b", 3, 30), "c": arrives("c", 5)}
    batch.apply(
        SchedulerOutput(
            1, list(first.values()), num_scheduled_tokens=dict.fromkeys(first, 1)
        )
    )
    before = state_of(batch)
    # Everything that is good about the step comes first: nothing of it may happen.
    output = SchedulerOutput(
        2,
        [arrives(name, 8) for name in step.get("new", ["d"])],
        [cached("a", 11), *step.get("cached", ())],
        num_scheduled_tokens=dict.fromkeys(step.get("scheduled", ()), 1),
        finished_req_ids=frozenset({"c"}),
    )
    with pytest.raises(error, match=words):
        batch.apply(output)
    assert state_of(batch) == before
    batch.check()
