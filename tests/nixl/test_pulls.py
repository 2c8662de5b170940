"""Reads under way, rank by rank; blocks that hold less than their hashes promise."""

from types import SimpleNamespace
from typing import cast

import pytest

from kvplugin.connectors.nixl.messages import VERSION, Completion, GroupRead, Report
from kvplugin.connectors.nixl.peers import Peer
from kvplugin.connectors.nixl.reads_under_way import Read, ReadsUnderWay
from kvplugin.connectors.nixl.requests import Phase
from kvplugin.contract import Step
from kvplugin.errors import IntegrityError
from tests.nixl.lab import Clock, Request, pair, spec


def under_way(ranks: int = 2) -> tuple[Clock, ReadsUnderWay]:
    clock = Clock()
    return clock, ReadsUnderWay(ranks, clock, 10.0)


def begin(reads: ReadsUnderWay, name: str = "r", *blocks: int) -> Read:
    return reads.begin(name, [GroupRead(0, 0, 16, [1], list(blocks or (7,)))])


def report(rank: int, *reads: Read, step: int = 1, error: str = "") -> Report:
    ends = [Completion(r.order.id, error, 5, 0.5 + rank, bool(error)) for r in reads]
    return Report(VERSION, rank, step, ends)


def test_a_read_ends_when_every_rank_has_said_so_once() -> None:
    _, reads = under_way()
    one, two = begin(reads), begin(reads, "s")
    assert list(reads.ended(report(0, one, two))) == []
    assert list(reads.ended(report(0, one, two))) == [], "again"
    assert list(reads.ended(report(2, one, two))) == [], "a rank that there is not"
    assert list(reads.ended(report(-1, one, two))) == []
    assert list(reads.ended(report(1, two))) == [two]
    assert (two.nbytes, two.seconds, two.error) == (10, 1.5, "")
    assert list(reads.ended(report(1, one, two))) == [one]
    assert list(reads.ended(report(1, one, two))) == [], "late"
    assert len(reads) == 0
    reads.check()


def test_one_rank_s_failure_is_the_read_s() -> None:
    _, reads = under_way()
    read = begin(reads)
    list(reads.ended(report(1, read, error="stale")))
    assert list(reads.ended(report(0, read))) == [read]
    assert (read.error, read.discarded) == ("stale", True)


def test_a_deadline_passes_once_and_blocks_count_until_the_end() -> None:
    clock, reads = under_way()
    one = begin(reads, "r", 1, 2, 3)
    clock.now += 5
    two = begin(reads, "s", 4)
    clock.now += 5
    assert reads.pop_overdue() == [one]
    assert reads.pop_overdue() == []
    assert (reads.overdue_blocks, reads.num_in_time) == (3, 1)
    reads.check()
    clock.now += 5
    assert reads.pop_overdue() == [two]
    list(reads.ended(report(0, one, two)))
    assert reads.overdue_blocks == 4
    list(reads.ended(report(1, one)))
    assert reads.overdue_blocks == 1
    reads.check()
    reads.overdue_blocks = 0
    with pytest.raises(IntegrityError, match="overdue"):
        reads.check()


def test_a_peer_is_silent_for_the_reads_that_came_after_its_last_good_end() -> None:
    _, reads = under_way()
    a, b = (cast(Peer, SimpleNamespace(peer_id=name)) for name in "ab")
    part = GroupRead(0, 0, 16, [1], [7])
    of_a = [reads.begin(f"a{n}", [part], peer=a) for n in range(4)]
    of_b = reads.begin("b", [part], peer=b)
    assert all(map(reads.is_silent, [*of_a, of_b]))
    for rank in (0, 1):
        list(reads.ended(report(rank, of_a[0], error="stale")))
    assert reads.is_silent(of_a[1]), "that was no good end"
    list(reads.ended(report(0, of_a[2])))
    assert reads.is_silent(of_a[1]), "rank 1 has not"
    list(reads.ended(report(1, of_a[2])))
    later = reads.begin("later", [part], peer=a)
    silent = [reads.is_silent(read) for read in (of_a[1], of_a[3], later, of_b)]
    assert silent == [False, False, True, True]
    reads.check()
    for rank in (0, 1):
        list(reads.ended(report(rank, of_a[1], of_a[3], later, of_b)))
    assert not reads._peers, "nothing is kept of peers that nothing is read from"


def test_a_read_is_awaited_until_every_rank_has_told_that_it_failed() -> None:
    _, reads = under_way()
    read = begin(reads)
    list(reads.ended(report(0, step=6)))
    list(reads.ended(report(1, step=6)))
    assert list(reads.awaited) == [read]
    read.given_up_by = 7
    assert list(reads.awaited) == [read]
    list(reads.ended(report(0, step=7)))
    assert list(reads.awaited) == [read], "rank 1 has not"
    list(reads.ended(report(1, step=8)))
    assert list(reads.awaited) == []
    assert len(reads) == 1


def test_blocks_that_hold_too_little_are_forgotten_as_soon_as_they_have_hashes() -> (
    None
):
    """A window of 20 tokens, blocks of 8 there and 16 here: token 10 is in a block that
    begins with token 8 there, and with token 0 here."""
    _network, producer, consumer = pair(
        spec("P", 4, 8, window=20), spec("D", 16, 16, window=20)
    )
    prompt = range(100, 130)
    request = Request("d", list(prompt), producer.prefill("p", prompt))
    consumer.half.arrived(request)
    assert consumer.half.lookup(request, 0).tokens == 29
    dense, window = consumer.pool.get_new_blocks(2), consumer.pool.get_new_blocks(2)
    rows = (dense, window)
    consumer.half.allocated(request, rows, 29)
    (worker,) = consumer.workers
    worker.begin_step(consumer.half.plan_step(Step()))
    consumer.read_all()
    assert not consumer.blocks.forgotten
    consumer.half.apply([worker.poll().report])
    # The engine gives hashes now; it may not find room for the rest at once.
    consumer.half.plan_step(Step())
    assert consumer.blocks.forgotten == window[:1]
    consumer.half.allocated(request, rows, 0)
    assert consumer.blocks.forgotten == window[:1] * 2
    consumer.half.plan_step(Step())
    assert consumer.blocks.forgotten == window[:1] * 2, "they may be somebody else's"
    consumer.half.check()
    consumer.half.finished(request)


@pytest.mark.parametrize("how", ["preempted", "finished"])
def test_blocks_that_are_given_back_are_not_forgotten(how: str) -> None:
    _network, producer, consumer = pair(
        spec("P", 4, 8, window=20), spec("D", 16, 16, window=20)
    )
    prompt = range(100, 130)
    request = Request("d", list(prompt), producer.prefill("p", prompt))
    consumer.half.arrived(request)
    consumer.half.lookup(request, 0)
    rows = (consumer.pool.get_new_blocks(2), consumer.pool.get_new_blocks(2))
    consumer.half.allocated(request, rows, 29)
    (worker,) = consumer.workers
    worker.begin_step(consumer.half.plan_step(Step()))
    consumer.read_all()
    consumer.half.apply([worker.poll().report])
    if how == "finished":
        consumer.half.finished(request)
    consumer.half.plan_step(Step(preempted=["d"]))
    consumer.half.plan_step(Step())
    assert not consumer.blocks.forgotten
    consumer.half.check()


def test_an_account_that_is_wrong_is_noticed() -> None:
    _network, producer, consumer = pair()
    request = consumer.add("d", range(100, 130), producer.prefill("p", range(100, 130)))
    consumer.half.check()
    pulls = consumer.half._pulls
    assert pulls is not None
    pull = pulls._pulls[request.request_id]
    pull.phase = Phase.ORDERED
    with pytest.raises(IntegrityError, match="waits for no read"):
        consumer.half.check()
    pull.phase = Phase.OVER
    with pytest.raises(IntegrityError, match="over"):
        consumer.half.check()
