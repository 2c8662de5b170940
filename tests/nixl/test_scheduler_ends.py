"""Ends of every kind: of requests, of reads, of all at once."""

import pytest

from kvplugin.connectors.nixl.wire import (
    Health,
    Status,
)
from kvplugin.contract import MISS, Step
from tests.nixl.lab import (
    DEAD_TTL,
    READ_TIMEOUT,
    Request,
    pair,
    spec,
)
from tests.nixl.lab_checks import counters, drain

PROMPT = range(100, 130)


# -- ends of requests ------------------------------------------------------------------


def test_a_request_that_ends_before_it_is_looked_at_frees_the_producer() -> None:
    _network, producer, consumer = pair()
    for says_arrived in (True, False):
        params = producer.prefill(f"a{says_arrived}", PROMPT)
        request = Request(f"b{says_arrived}", list(PROMPT), params)
        if says_arrived:
            consumer.half.arrived(request)
        assert not consumer.half.finished(request)
        producer.step()
        producer.check_idle()
    drain(consumer, producer)


def test_a_full_local_hit_frees_the_producer() -> None:
    _network, producer, consumer = pair()
    request = Request("b", list(PROMPT), producer.prefill("a", PROMPT))
    consumer.half.arrived(request)
    assert consumer.half.lookup(request, 28).tokens == 1
    consumer.half.allocated(request, ([1, 2, 3, 4, 5, 6, 7, 8],), 0)
    producer.step()
    producer.check_idle()
    assert consumer.half.lookup(request, 0) == MISS, "one chance a request"
    consumer.half.finished(request)
    drain(consumer, producer)


def test_a_preempted_request_computes_and_its_read_ends_by_itself() -> None:
    _network, producer, consumer = pair()
    request = consumer.add("b", PROMPT, producer.prefill("a", PROMPT))
    consumer.step()
    consumer.half.plan_step(Step(preempted=["b"]))
    assert consumer.half.lookup(request, 0) == MISS
    assert consumer.channel.kept, "bytes are still read"
    assert consumer.blocks.held
    consumer.read_all()
    consumer.step()
    assert not consumer.channel.kept
    assert not consumer.blocks.held
    drain(consumer, producer)


def test_scenario_58_an_aborted_read_ends_before_its_blocks_are_used_again() -> None:
    _network, producer, consumer = pair()
    request = consumer.add("b", PROMPT, producer.prefill("a", PROMPT))
    consumer.step()
    rows = [block for row in request.rows for block in row]
    consumer.abort(request)
    consumer.step()
    assert consumer.half.has_pending_work()
    assert set(consumer.blocks.held) == set(rows)
    producer.step()
    assert producer.half.has_pending_work(), "the lease outlives the request"
    consumer.run(2)
    assert not consumer.blocks.held
    drain(consumer, producer)


def test_a_read_past_its_deadline_is_given_up_and_its_blocks_stay() -> None:
    network, producer, consumer = pair(max_overdue_fraction=0.05)
    request = consumer.add("b", PROMPT, producer.prefill("a", PROMPT))
    consumer.step()
    blocks = set(consumer.blocks.held)
    network.clock.now += READ_TIMEOUT
    consumer.step()  # told
    assert request.computed == 0
    consumer.step()
    assert request.computed == len(PROMPT), "computed"
    assert set(consumer.blocks.held) == blocks
    assert not consumer.half.has_pending_work()
    stats = consumer.half.take_stats()
    assert stats is not None
    assert stats.gauges["overdue_blocks"] == len(blocks)
    assert stats.counters["given_up_reads"] == stats.counters["failed_reads"] == 1
    network.clock.now += DEAD_TTL
    later = consumer.add("c", PROMPT, producer.prefill("d", PROMPT))
    consumer.run_without_reads()
    assert later.loaded == 0, "too many overdue blocks"
    consumer.run()
    assert not consumer.blocks.held
    again = consumer.add("e", PROMPT, producer.prefill("f", PROMPT))
    drain(consumer, producer)
    assert again.loaded


def test_a_peer_that_others_are_read_from_is_busy_and_not_dead() -> None:
    """Three reads pass their deadline while others of their peer end well; then they
    end as failed, as nothing of them was begun."""
    network, producer, consumer = pair()
    late = [
        consumer.add(f"l{n}", PROMPT, producer.prefill(f"p{n}", PROMPT)) for n in "abc"
    ]
    good = consumer.add("g", PROMPT, producer.prefill("p", PROMPT))
    consumer.step()
    (worker,) = consumer.workers
    of = {reading.order.request_id: read for read, reading in worker.readings.items()}
    network.clock.now += READ_TIMEOUT / 2
    worker.sample(of["g"])
    worker.verify(of["g"])
    consumer.step()
    assert good.loaded
    network.clock.now += READ_TIMEOUT / 2
    consumer.step()
    assert counters(consumer)["given_up_reads"] == len(late)
    for request in late:
        worker.finish(of[request.request_id], error="nobody waits for it any more")
    consumer.step()
    after = consumer.add("after", PROMPT, producer.prefill("q", PROMPT))
    drain(consumer, producer)
    assert after.loaded, "its peer is not dead"
    assert not any(request.loaded for request in late)


def test_a_peer_that_was_well_before_an_order_is_dead_if_that_does_not_end() -> None:
    network, producer, consumer = pair()
    before = consumer.add("b", PROMPT, producer.prefill("a", PROMPT))
    drain(consumer, producer)
    assert before.loaded
    consumer.add("late", PROMPT, producer.prefill("p", PROMPT))
    consumer.step()
    network.clock.now += READ_TIMEOUT
    consumer.step()
    stats = consumer.half.take_stats()
    assert stats is not None
    assert stats.gauges["dead_peers"] == 1
    after = consumer.add("after", PROMPT, producer.prefill("q", PROMPT))
    drain(consumer, producer)
    assert not after.loaded


def test_reports_that_are_late_repeated_or_of_nobody_change_nothing() -> None:
    _network, producer, consumer = pair(consumer=spec("D", 4, ranks=2))
    reports: list[bytes] = []
    original = consumer.half.apply

    def apply(new: list[bytes]) -> None:
        reports.extend(new)
        original([*new, *reports, *new])

    consumer.half.apply = apply  # type: ignore[method-assign]
    for name in "ab":
        consumer.add(f"d{name}", PROMPT, producer.prefill(name, PROMPT))
        drain(consumer, producer)
    assert counters(consumer)["reads"] == 2


# -- all at once -----------------------------------------------------------------------


def test_distrusted_blocks_are_not_served() -> None:
    _network, producer, consumer = pair()
    params = producer.prefill("a", PROMPT)
    good = producer.prefill("b", PROMPT)
    producer.half.distrust({params["remote_block_ids"][0][3]})
    bad = consumer.add("c", PROMPT, params)
    fine = consumer.add("d", PROMPT, good)
    drain(consumer, producer)
    assert (bad.loaded, fine.loaded) == (0, len(PROMPT) - 1)


def test_distrust_while_it_is_read() -> None:
    _network, producer, consumer = pair()
    params = producer.prefill("a", PROMPT)
    request = consumer.add("b", PROMPT, params)
    consumer.step()
    producer.half.distrust({params["remote_block_ids"][0][0]})
    producer.step()
    consumer.run()
    assert (request.loaded, request.computed) == (0, len(PROMPT))
    drain(consumer, producer)


def test_a_reset_ends_what_is_granted_and_waits_for_what_is_read() -> None:
    _network, producer, consumer = pair()
    waiting = Request("b", list(PROMPT), producer.prefill("a", PROMPT))
    consumer.half.arrived(waiting)
    consumer.add("d", PROMPT, producer.prefill("c", PROMPT))
    consumer.step()
    assert not consumer.half.reset()
    assert consumer.half.lookup(waiting, 0) == MISS
    consumer.half.finished(waiting)
    consumer.read_all()
    consumer.step()
    assert consumer.half.reset()
    params = producer.prefill("e", PROMPT)
    assert producer.half.reset()
    producer.step()
    producer.check_idle()
    request = consumer.add("f", PROMPT, params)
    drain(consumer, producer)
    assert request.loaded == 0


def test_an_overdue_read_does_not_keep_a_reset_waiting_once_all_were_told() -> None:
    network, producer, consumer = pair()
    consumer.add("b", PROMPT, producer.prefill("a", PROMPT))
    consumer.step()
    network.clock.now += READ_TIMEOUT
    plan = consumer.half.plan_step(Step())
    assert not consumer.half.reset(), "nobody has executed that plan"
    (worker,) = consumer.workers
    worker.begin_step(plan)
    consumer._hear([worker.poll()])
    assert consumer.half.reset()
    assert consumer.blocks.held
    drain(consumer, producer)


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_it_can_be_closed_in_any_state(steps: int) -> None:
    network, producer, consumer = pair()
    for i in range(3):
        consumer.add(f"b{i}", PROMPT, producer.prefill(f"a{i}", PROMPT))
        for _ in range(min(steps, i)):
            consumer.step()
    if steps == 3:
        consumer.read_all()
    consumer.half.close()
    consumer.half.close()
    producer.step()
    producer.check_idle()
    producer.half.close()
    assert producer.address not in network.servers


def test_rows_that_are_not_as_offered_fail_instead_of_being_filled_wrongly() -> None:
    _network, producer, consumer = pair()
    request = Request("b", list(PROMPT), producer.prefill("a", PROMPT))
    consumer.half.arrived(request)
    assert consumer.half.lookup(request, 0).tokens == 29
    blocks = consumer.pool.get_new_blocks(4)
    consumer.half.allocated(request, (blocks,), 29)
    (worker,) = consumer.workers
    worker.begin_step(consumer.half.plan_step(Step()))
    outcome = worker.poll()
    assert set(outcome.failed_loads["b"]) == set(blocks)
    consumer.half.apply([outcome.report])
    assert not consumer.blocks.held
    assert consumer.half.lookup(request, 0) == MISS
    stranger = Request("s", list(PROMPT))
    consumer.half.allocated(stranger, (blocks,), 16)
    worker.begin_step(consumer.half.plan_step(Step()))
    outcome = worker.poll()
    assert "s" in outcome.failed_loads
    consumer.half.apply([outcome.report])
    consumer.half.finished(request)
    consumer.half.finished(stranger)
    consumer.pool.free_blocks(blocks)
    drain(consumer, producer)
    assert counters(consumer)["failed_reads"] == 2


def test_the_status_of_a_server_is_asked_like_anything_else() -> None:
    network, producer, _ = pair()
    assert isinstance(network.answer(producer.address, Status()), Health)
