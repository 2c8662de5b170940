"""Loads that fail, in engines that can be told and in those that cannot."""

import pytest

from kvplugin.contract import CopyJob
from kvplugin.errors import TransferError
from kvplugin.hashing import make_key
from kvplugin.managers.sliding_window import SlidingWindowManager
from tests.offload.hybrid_lab import HybridLab
from tests.offload.hybrid_mixes import MIXES

DOCUMENT = [*range(100, 148)]
TAIL = [7, 7, 7]


def loading(name: str, *, can_fail: bool, ranks: int = 1) -> tuple[HybridLab, CopyJob]:
    """A request is parked, its load is under way."""
    lab = HybridLab(
        MIXES[name],
        ranks=ranks,
        offload={"transfer_timeout_s": 5.0},
        engine={"reports_failed_loads": can_fail},
    )
    lab.serve(DOCUMENT)
    lab.forget_local()
    lab.hold()
    lab.add([*DOCUMENT, *TAIL], 3)
    lab.step()
    (load,) = lab.pending(store=False)
    return lab, load


@pytest.mark.parametrize("name", MIXES)
def test_a_torn_load_is_computed_and_not_offered_again(name: str) -> None:
    """On one rank of two, after one block of the first group."""
    lab, load = loading(name, can_fail=True, ranks=2)
    lab.transports[0].complete(load.id)
    lab.transports[1].tear(load.id, blocks=1)
    lab.let_go()
    lab.run()
    assert lab.reasons["r1"] == "length"
    assert len(lab.witness.credited["r1"]) == 1, "it does not try again"
    lab.drain()


@pytest.mark.parametrize("name", MIXES)
def test_what_an_engine_cannot_be_told_is_tried_again(name: str) -> None:
    lab, load = loading(name, can_fail=False)
    for _ in range(3):
        lab.transports[0].tear(load.id, blocks=1)
        lab.step()
        assert lab.outputs["r1"] == []
        (load,) = lab.pending(store=False)
    lab.let_go()
    lab.run()
    assert lab.reasons["r1"] == "length"
    lab.drain()


def test_an_engine_that_cannot_be_told_ends_before_it_serves_wrong_text() -> None:
    lab, load = loading("full+window", can_fail=False)
    for _ in range(3):
        lab.fail(load)
        lab.step()
        (load,) = lab.pending(store=False)
    lab.fail(load)
    with pytest.raises(TransferError, match="cannot be told"):
        lab.steps(2)


def test_an_engine_that_cannot_be_told_waits_for_what_is_overdue() -> None:
    lab, load = loading("full+aligned states", can_fail=False)
    lab.now += 60
    lab.steps(3)
    assert lab.outputs["r1"] == []
    lab.complete(load)
    lab.drain()
    assert lab.reasons["r1"] == "length"


def test_a_row_with_a_block_that_host_memory_has_not_is_not_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine keeps more of a window than anybody reads, and would give every block
    of it a hash: one that cannot be filled makes the whole load a failed one."""
    lab = HybridLab(MIXES["full+window"], usable=80)
    lab.serve(DOCUMENT)
    lab.forget_local()
    request = lab.request_of([*DOCUMENT, *TAIL])
    slot = lab.half._tier.slot_of(make_key(request.block_hashes[3], 1))
    lab.half._tier.drop(1, [slot])
    monkeypatch.setattr(
        SlidingWindowManager, "get_num_skipped_tokens", lambda self, n: 0
    )
    assert lab.offered([*DOCUMENT, *TAIL]).tokens == 48, "nobody reads that block"
    lab.witness.may_refuse = True
    lab.serve([*DOCUMENT, *TAIL], 3)
    assert not lab.jobs(store=False)
    assert lab.account.totals["failed_loads"] == 1
    lab.drain()
