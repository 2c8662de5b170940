"""The worker's rows are the manager's, whatever the real scheduler does."""

import random
from dataclasses import dataclass

import pytest

from kvplugin.block import NULL_BLOCK
from kvplugin.spec import ChunkedLocalAttentionSpec, KVCacheSpec
from kvplugin.worker.batch import StepBatch, WorkerBatch
from kvplugin.worker.block_table import BlockTables
from kvplugin.worker.table_shape import table_shape
from tests.scheduler.harness import HEADS, Harness, full, window
from tests.worker.naive import kernel_blocks, limits


def chunked(size: int, block_size: int = 4) -> KVCacheSpec:
    return ChunkedLocalAttentionSpec(
        block_size=block_size, attention_chunk_size=size, **HEADS
    )


GROUPS = (
    [full()],
    [full(), window(6)],
    [full(), window(6), window(11)],
    [window(7)],
    [full(), chunked(8)],
    [full(8), window(9)],
)


@dataclass
class Seen:
    """What a run has come across."""

    preempted: int = 0
    null: int = 0
    """Entries that are null in both."""
    earlier: int = 0
    """Those that are null for the worker alone."""


def check_rows(
    harness: Harness, batch: WorkerBatch, step: StepBatch, depth: int, seen: Seen
) -> None:
    """The rows of a step's requests are the manager's. With steps in flight the
    manager may hold blocks for longer: of tokens that no query of this step sees."""
    managers = harness.kv.coordinator.single_type_managers
    for row, request in enumerate(step.requests):
        rows = harness.rows(request.req_id)
        computed = int(step.num_computed[row])
        for table, ids, manager in zip(
            batch.tables.tables, rows, managers, strict=True
        ):
            ratio, mine = table.shape.ratio, table.row(row)
            assert len(mine) == len(ids) * ratio
            unseen = manager.get_num_skipped_tokens(computed) // manager.block_size
            for i, block in enumerate(ids):
                entry = mine[i * ratio : (i + 1) * ratio]
                if entry == kernel_blocks([block], ratio):
                    seen.null += block == NULL_BLOCK
                    continue
                assert depth > 1
                assert i < unseen
                assert entry == kernel_blocks([NULL_BLOCK], ratio)
                seen.earlier += 1


def drive(seed: int, depth: int, drafts: int) -> Seen:
    """Random requests through the real scheduler, blocks scarce."""
    rng, seen = random.Random(seed), Seen()
    groups = GROUPS[seed % len(GROUPS)]
    harness = Harness(
        12 * len(groups),
        groups,
        drafts=drafts,
        num_lookahead_tokens=drafts,
        pipeline_depth=depth,
    )
    shapes = [table_shape(spec, limits(64), 2) for spec in groups]
    batch = WorkerBatch(BlockTables(shapes, max_num_reqs=12, max_model_len=64))
    for name in range(12):
        prompt = [rng.randrange(50) for _ in range(rng.randint(1, 30))]
        harness.add(f"r{name}", prompt, rng.randint(1, 9))
    while harness.scheduler.has_work():
        ahead = depth if harness.scheduler.requests else 1
        while len(harness.in_flight) < ahead:
            output = harness.schedule()
            step = batch.apply(output)
            batch.check()
            check_rows(harness, batch, step, depth, seen)
            seen.preempted += len(output.preempted_req_ids)
        harness.land(accepted=rng.choice([None, 0, 1]) if drafts else None)
    assert len(harness.reasons) == 12
    return seen


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("depth", [1, 2])
def test_rows_are_those_of_the_scheduler(depth: int, drafts: int) -> None:
    runs = [drive(seed, depth, drafts) for seed in range(12)]
    assert sum(run.preempted for run in runs) > 10
    assert sum(run.null for run in runs) > 100
    assert (sum(run.earlier for run in runs) > 10) == (depth > 1)
