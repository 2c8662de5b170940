"""The oracle itself: faults that are put in on purpose are noticed.

A content model that cannot fail proves nothing. Each test here takes away one thing
that keeps bytes right and expects the model to say so.
"""

from collections.abc import Sequence

import pytest

from kvplugin import BlockPool
from kvplugin.contract import CopyJob
from tests.offload.engine_model import Engine
from tests.offload.setup_model import Setup, prompt


class NoReferences:
    """References that hold nothing."""

    def __init__(self, pool: BlockPool) -> None:
        del pool

    def acquire(self, ids: Sequence[int]) -> None:
        del ids

    def release(self, ids: Sequence[int]) -> None:
        del ids


def test_a_store_that_reads_reused_blocks_is_noticed() -> None:
    engine = Engine(Setup(usable_blocks=4), make_blocks=NoReferences)
    engine.jobs.hold()
    first = engine.add(prompt(8, seed=1))
    engine.step()
    assert not first.row
    engine.add(prompt(13, seed=2), max_new_tokens=3)
    engine.step()
    engine.jobs.complete(engine.jobs.stores[0])
    engine.jobs.let_go()
    engine.run()
    engine.forget_local()
    with pytest.raises(AssertionError, match="expected"):
        engine.serve(prompt(8, seed=1))


def test_a_store_that_reads_free_blocks_is_noticed() -> None:
    engine = Engine(make_blocks=NoReferences)
    engine.jobs.hold()
    engine.add(prompt(8))
    engine.step()
    with pytest.raises(AssertionError, match="uses free block"):
        engine.jobs.complete(*engine.jobs.stores)


def test_a_load_that_is_reported_before_its_bytes_are_there_is_noticed() -> None:
    engine = Engine()
    engine.serve(prompt(16))
    engine.forget_local()
    execute = engine.memories[0].execute

    def skip_loads(job: CopyJob) -> int:
        return execute(job) if job.store else 0

    engine.transports[0].execute = skip_loads
    with pytest.raises(AssertionError, match="expected"):
        engine.serve(prompt(16))


def test_a_load_of_other_blocks_than_those_asked_for_is_noticed() -> None:
    engine = Engine()
    engine.serve(prompt(16))
    engine.forget_local()
    execute = engine.memories[0].execute

    def swap(job: CopyJob) -> int:
        ((group, engine_ids, host_ids),) = job.parts
        return execute(job._replace(parts=[(group, engine_ids, host_ids[::-1])]))

    engine.transports[0].execute = swap
    with pytest.raises(AssertionError, match="expected"):
        engine.serve(prompt(16))


def test_the_bytes_of_another_rank_are_noticed() -> None:
    engine = Engine(Setup(ranks=2))
    engine.serve(prompt(16))
    engine.forget_local()
    first, second = engine.memories
    first.host, second.host = second.host, first.host
    with pytest.raises(AssertionError, match="expected"):
        engine.serve(prompt(16))


def test_a_request_that_is_remembered_is_noticed() -> None:
    engine = Engine()
    (request,) = engine.serve(prompt(16))
    kept = engine.view(request)
    with pytest.raises(AssertionError, match="remembers requests"):
        engine.check_idle()
    del kept
    engine.check_idle()


def test_outputs_do_not_depend_on_how_a_request_was_served() -> None:
    setups = [
        Setup(),
        Setup(token_budget=3),
        Setup(drafts=4),
        Setup(prefix_caching=False, ranks=2),
    ]
    outputs = []
    for setup in setups:
        engine = Engine(setup)
        (request,) = engine.serve(prompt(10), max_new_tokens=12)
        outputs.append(request.output)
    assert outputs == outputs[:1] * len(setups)
