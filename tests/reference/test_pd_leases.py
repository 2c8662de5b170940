"""Leases: how long blocks are kept, and what whoever comes too late gets."""

from collections.abc import Callable
from typing import Any

import pytest

from kvplugin.connectors.nixl.config import Role
from tests.reference.bench import tokens, window
from tests.reference.models import FULL, RECURRENT, assert_empty, step_to_the_end
from tests.reference.pd import HANDS_OVER, Held, Pair, Side, Time, patiently

LEASE = 30.0
RESTART = 5.0
"""Seconds that an engine takes at least."""
CLOCKED: dict[str, Any] = {"connector": {"kv_lease_duration": LEASE}}


def producer(clock: Callable[[], float], **changes: Any) -> dict[str, Any]:
    """A side whose leases run by a clock of the test's."""
    return {"clock": clock} | CLOCKED | changes


@pytest.mark.parametrize("length", [1, 3, 8, 20])
def test_scenario_43_blocks_come_back_after_every_handover(length: int) -> None:
    """Prompts shorter than a block, prompts of which nothing is read, prompts that
    are all there already: within a bounded number of steps after the farewell."""
    with Pair(block_size=8) as pair:
        for _ in range(3):  # the second time all but the last block is there
            pair.serve(tokens(length))
            pair.until(lambda: not pair.p.engine.has_work(), "the farewell")
            assert pair.p.num_used_blocks == 0
        assert pair.p.count("closed_leases") == 3


def test_scenario_43_a_handover_nobody_fetches_ends_with_its_lease() -> None:
    clock = Time()
    with Pair(block_size=8, producer=producer(clock)) as pair:
        params = pair.prefill(tokens(20))
        for _ in range(20):
            pair.step()
        assert pair.p.num_used_blocks == 3
        clock.now += LEASE
        pair.p.engine.step()
        pair.p.engine.step()
        assert pair.p.num_used_blocks == 0
        assert not pair.p.engine.has_work()
        assert pair.p.count("expired_leases") == 1
        # Who comes now is told so, and computes.
        assert pair.decode(tokens(20), params).num_cached_tokens == 0


LATE = [(FULL, FULL), (FULL, window(9)), (RECURRENT, FULL)]


@pytest.mark.parametrize("layers", LATE)
def test_scenario_25_what_was_read_after_the_lease_is_never_served(layers: Any) -> None:
    """The consumer has been granted the lease and is late; the producer's time is over
    and it uses the blocks again; then the consumer reads. The bytes arrive, are found
    to be others', and the request computes."""
    clock = Time()
    tight = producer(clock, num_blocks=24, max_model_len=88)
    with Pair(layers, block_size=8, producer=tight) as pair:
        prompt = tokens(40)
        params = pair.prefill(prompt)
        hold = Held(pair.d)
        id_ = pair.d.add(prompt, 4, params)
        pair.until(lambda: bool(hold.orders), "the order")
        clock.now += LEASE + 0.1
        patiently(lambda: not pair.p.engine.has_work(), "the end", pair.p.engine)
        others = [pair.p.add(tokens(60, seed=7 + i), 20, None) for i in range(3)]
        patiently(lambda: pair.p.is_done(*others), "new blocks", pair.p.engine)
        hold.let_go()
        pair.until(lambda: pair.d.is_done(id_), "the decode")
        pair.d.compare(id_)
        assert pair.d.count("discarded_reads") == 1
        assert pair.d.count("reads") == 0
        # Nothing of it stays in the consumer's cache.
        pair.decode([*prompt, 1, 2, 3], None)


def test_scenario_25_blocks_that_nobody_used_again_are_not_trusted_either() -> None:
    clock = Time()
    with Pair(block_size=8, producer=producer(clock)) as pair:
        prompt = tokens(40)
        params = pair.prefill(prompt)
        hold = Held(pair.d)
        id_ = pair.d.add(prompt, 4, params)
        pair.until(lambda: bool(hold.orders), "the order")
        clock.now += LEASE + 0.1
        patiently(lambda: not pair.p.engine.has_work(), "the end", pair.p.engine)
        hold.let_go()
        pair.until(lambda: pair.d.is_done(id_), "the decode")
        pair.d.compare(id_)
        assert pair.d.count("discarded_reads") == 1


def test_scenario_25_a_renewed_lease_does_not_run_out() -> None:
    clock = Time()
    with Pair(block_size=8, producer=producer(clock)) as pair:
        prompt = tokens(40)
        params = pair.prefill(prompt)
        hold = Held(pair.d)
        id_ = pair.d.add(prompt, 4, params)
        pair.until(lambda: bool(hold.orders), "the order")
        leases: Any = pair.p.engine.scheduler_half
        (lease,) = leases._leases._leases.values()
        for _ in range(4):
            deadline = lease.deadline  # a renewal may come as soon as time has passed
            clock.now += LEASE * 0.9
            # The client renews by its own clock, which does not stand still; here it
            # does what it would have done by now.
            pull = pair.d.engine.scheduler_half._pulls._pulls[id_]  # type: ignore[union-attr]
            channel: Any = pair.d.engine.scheduler_half._channel  # type: ignore[union-attr]
            channel.keep(pull.source.address, pull.source.lease, pull.reader, 0.001)
            patiently(lambda d=deadline: lease.deadline > d, "a renewal", pair.p.engine)  # type: ignore[misc]
        assert pair.p.num_used_blocks
        hold.let_go()
        pair.until(lambda: pair.d.is_done(id_), "the decode")
        assert pair.d.answer(id_).num_cached_tokens == 39
        assert pair.d.count("reads") == 1


# -- somebody dies ---------------------------------------------------------------------


def test_a_producers_blocks_come_back_when_its_consumer_is_gone() -> None:
    """It has opened the lease and dies without a farewell: nobody renews it."""
    clock = Time()
    pair = Pair(block_size=8, producer=producer(clock))
    params = pair.prefill(tokens(40))
    hold = Held(pair.d)
    pair.d.add(tokens(40), 4, params)
    pair.until(lambda: bool(hold.orders), "the order")
    half: Any = pair.d.engine.scheduler_half
    half._channel.drop = lambda *_: None
    half._channel.keep = lambda *_: None
    pair.d.close()
    clock.now += 10 * LEASE  # beyond any renewal that was under way
    patiently(lambda: not pair.p.engine.has_work(), "the end", pair.p.engine)
    assert_empty(pair.p.engine)
    pair.p.close()


@pytest.mark.parametrize("when", ["before", "granted"])
def test_a_consumer_computes_when_its_producer_is_gone(when: str) -> None:
    pair = Pair(block_size=8, connector={"handshake_timeout_s": 0.3})
    prompt, other = tokens(40), tokens(44, seed=2)
    params, second = pair.prefill(prompt), pair.prefill(other)
    if when == "granted":
        pair.decode(tokens(30, seed=3), pair.prefill(tokens(30, seed=3)))
    pair.p.close()
    for text, what in ((prompt, params), (other, second)):
        id_ = pair.d.add(text, 4, what)
        patiently(lambda id_=id_: pair.d.is_done(id_), "the answer", pair.d.engine)  # type: ignore[misc]
        pair.d.compare(id_)
        assert pair.d.answer(id_).num_cached_tokens == 0
    assert pair.d.count("dead_peers") == 1
    step_to_the_end(pair.d.engine)
    assert_empty(pair.d.engine)
    pair.d.close()


def test_scenario_57_a_producer_restarted_on_the_same_address() -> None:
    """Another engine id, another memory: one new handshake, old leases are gone, other
    peers are not disturbed."""
    clock = Time()
    with Pair(block_size=8, consumer={"clock": clock}) as pair:
        prompt = tokens(40)
        pair.serve(prompt)
        other = Side(pair.model, Role.PRODUCER, "other", block_size=8)
        stale = pair.prefill(tokens(33, seed=3))
        pair.p.close()
        restarted = Side(
            pair.model,
            Role.PRODUCER,
            "prefill-2",
            block_size=8,
            connector={"side_channel_port": pair.p.port},
        )
        pair.p = restarted
        clock.now += RESTART
        # From before the restart: an engine that is not there any more.
        assert pair.decode(tokens(33, seed=3), stale).num_cached_tokens == 0
        for seed in (5, 6):
            assert pair.serve(tokens(41, seed=seed)).num_cached_tokens == 40
        assert pair.d.count("handshakes") == 2
        params = hand_over(other, tokens(20, seed=8))
        id_ = pair.d.add(tokens(20, seed=8), 4, params)
        engines = pair.p.engine, pair.d.engine, other.engine
        patiently(lambda: pair.d.is_done(id_), "the other's", *engines)
        assert pair.d.answer(id_).num_cached_tokens == 19
        pair.d.compare(id_)
        patiently(lambda: not other.engine.has_work(), "the end", *engines)
        other.close()


def test_scenario_57_the_same_name_on_the_same_address_is_another_life() -> None:
    """Restarted with the engine id that it had: its lives are told apart."""
    clock = Time()
    with Pair(block_size=8, consumer={"clock": clock}) as pair:
        pair.serve(tokens(40))
        stale = pair.prefill(tokens(33, seed=3))
        pair.p.close()
        pair.p = Side(
            pair.model,
            Role.PRODUCER,
            "prefill",
            block_size=8,
            connector={"side_channel_port": pair.p.port},
        )
        clock.now += RESTART
        assert pair.decode(tokens(33, seed=3), stale).num_cached_tokens == 0
        assert pair.serve(tokens(41, seed=5)).num_cached_tokens == 40


@pytest.mark.parametrize("producer_too", [False, True])
def test_a_consumer_that_is_restarted_reads_again(producer_too: bool) -> None:
    with Pair(block_size=8) as pair:
        assert pair.serve(tokens(40)).num_cached_tokens == 39
        pair.d.close()
        if producer_too:
            pair.p.close()
            pair.p = Side(pair.model, Role.PRODUCER, "prefill", block_size=8)
        pair.d = Side(pair.model, Role.CONSUMER, "decode", block_size=8)
        assert pair.serve(tokens(41, seed=2)).num_cached_tokens == 40


def hand_over(side: Side, prompt: list[int]) -> dict[str, Any]:
    id_ = side.add(prompt, 1, HANDS_OVER)
    patiently(lambda: side.is_done(id_), "the prefill", side.engine)
    params = side.answer(id_).kv_transfer_params
    assert params is not None
    return dict(params)


def test_two_producers_and_one_consumer() -> None:
    with Pair(block_size=8) as pair:
        other = Side(pair.model, Role.PRODUCER, "other", block_size=16, layout="HND")
        jobs = []
        for i in range(6):
            prompt = tokens(30 + i, seed=i)
            params = hand_over(other if i % 2 else pair.p, prompt)
            jobs.append(pair.d.add(prompt, 4, params))
        engines = pair.p.engine, pair.d.engine, other.engine
        patiently(lambda: pair.d.is_done(*jobs), "all", *engines)
        for i, id_ in enumerate(jobs):
            assert pair.d.answer(id_).num_cached_tokens == 29 + i
            pair.d.compare(id_)
        patiently(lambda: not other.engine.has_work(), "the end", *engines)
        other.close()


def test_a_full_pool_of_leases_serves_others_as_soon_as_they_end() -> None:
    """The producer's blocks are all handed over: who comes next waits, not for ever."""
    clock = Time()
    with Pair(
        block_size=8, producer=producer(clock, num_blocks=11, max_model_len=64)
    ) as pair:
        pair.prefill(tokens(40))
        params = pair.prefill(tokens(38, seed=2))
        id_ = pair.p.add(tokens(33, seed=3), 1, HANDS_OVER)
        for _ in range(5):
            pair.p.engine.step()
        assert not pair.p.is_done(id_)
        pair.decode(tokens(38, seed=2), params)
        pair.until(lambda: pair.p.is_done(id_), "its turn")
        handed = pair.p.answer(id_).kv_transfer_params
        assert pair.decode(tokens(33, seed=3), handed).num_cached_tokens == 32
        clock.now += LEASE
