"""Transfers that do not end: nobody waits, and what they touch is nobody else's."""

from collections.abc import Sequence

import pytest

from kvplugin.contract import MISS
from tests.offload.hybrid_lab import HybridLab
from tests.offload.hybrid_mixes import MIXES

DOCUMENT = [*range(100, 148)]
TAIL = [7, 7, 7]
TIMEOUT = {"transfer_timeout_s": 5.0}
BLOCKED = {**TIMEOUT, "max_overdue_fraction": 0.0}


def loading(
    name: str,
    offload: dict[str, float],
    *,
    before: Sequence[int] = (),
    **settings: object,
) -> HybridLab:
    """A request is parked, its load is under way; there is room for others, and
    `before` is in host memory as well."""
    mix = MIXES[name]
    lab = HybridLab(mix, usable=2 * mix.usable, offload=offload, **settings)  # type: ignore[arg-type]
    for document in filter(None, (before, DOCUMENT)):
        lab.serve(document)
    lab.forget_local()
    lab.hold()
    lab.add([*DOCUMENT, *TAIL], 3)
    lab.step()
    assert lab.pending(store=False)
    return lab


def targets(lab: HybridLab) -> set[int]:
    """Blocks that the load under way fills."""
    (load,) = lab.pending(store=False)
    return {block for _, blocks, _ in load.parts for block in blocks}


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_request_computes_what_does_not_come(name: str, ranks: int) -> None:
    """It ends while the copy still goes on, into blocks that nobody else is given."""
    lab = loading(name, TIMEOUT, ranks=ranks)
    blocks = targets(lab)
    if ranks == 2:  # one of two is not enough
        lab.transports[1].complete(lab.transports[1].pending[0].id)
    lab.now += 4.9
    lab.steps(2)
    assert lab.outputs["r1"] == [], "it is not overdue yet"
    lab.now += 0.2
    for _ in range(30):
        lab.step()
        if "r1" in lab.reasons:
            break
    assert lab.reasons.get("r1") == "length"
    assert all(lab.kv.block_pool.ref_count(block) for block in blocks)
    lab.add([*range(500, 520)], 2)  # others may have any block but these
    lab.steps(6)
    lab.transports[0].complete(lab.pending(store=False)[0].id)
    lab.steps(2)
    assert not any(lab.kv.block_pool.ref_count(block) for block in blocks)
    lab.drain()


def test_a_request_may_end_with_an_error_instead() -> None:
    lab = loading("full+window", TIMEOUT, kv_load_failure_policy="fail")
    lab.now += 6
    lab.steps(3)
    assert lab.reasons["r1"] == "error"
    lab.drain()


@pytest.mark.parametrize("name", MIXES)
def test_an_end_of_which_only_the_engine_has_heard(name: str) -> None:
    """The scheduler half hears of it after the deadline, when the request has long
    ended and its blocks are others'."""
    lab = loading(name, TIMEOUT)
    lab.witness.is_late = True
    lab.complete(*lab.pending(store=False))
    for _ in range(20):
        lab.step()
    assert "r1" in lab.reasons
    lab.forget_local()
    lab.now += 6
    lab.add([*range(500, 530)], 2)
    lab.steps(4)
    lab.witness.is_late = False
    lab.drain()


def test_while_too_much_is_overdue_nothing_is_offered_and_nothing_stored() -> None:
    other = [*range(700, 732)]
    lab = loading("full+window", BLOCKED, before=other)
    assert lab.offered([*other, *TAIL]).tokens
    (load,) = lab.pending(store=False)
    lab.now += 6
    lab.step()
    begun = len(lab.jobs(store=True))
    assert lab.offered([*other, *TAIL]) == MISS
    lab.add([*range(500, 530)], 2)
    lab.steps(6)
    assert len(lab.jobs(store=True)) == begun
    lab.complete(load)
    lab.steps(2)
    assert lab.offered([*other, *TAIL]).tokens
    lab.let_go()
    lab.serve([*range(600, 630)])
    assert len(lab.jobs(store=True)) > begun
    lab.drain()


@pytest.mark.parametrize("name", MIXES)
def test_a_store_that_does_not_end_holds_its_sources_and_nobody_up(name: str) -> None:
    lab = HybridLab(MIXES[name], offload=TIMEOUT)
    lab.hold()
    lab.serve(DOCUMENT)  # ends, though its stores do not
    stores = lab.pending(store=True)
    sources = {b for job in stores for _, blocks, _ in job.parts for b in blocks}
    lab.now += 6
    lab.steps(2)
    assert lab.account.gauges["overdue_blocks"] == len(sources)
    lab.forget_local()
    assert lab.offered([*DOCUMENT, *TAIL]) == MISS, "it is not there yet"
    assert all(lab.kv.block_pool.ref_count(block) for block in sources)
    lab.complete(*stores)
    lab.steps(2)
    assert lab.offered([*DOCUMENT, *TAIL]).tokens
    lab.drain()
