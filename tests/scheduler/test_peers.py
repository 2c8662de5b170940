"""Requests that one engine hands over to another: when, with what, and when not."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from kvplugin.contract import Lookup, MeetsPeers, WorkerOutcome
from kvplugin.testing import ContentError, PeerLab
from tests.core.manager_setups import full, mamba, window
from tests.scheduler.harness import Connector, Harness, next_token

HANDS_OVER: dict[str, Any] = {"do_remote_decode": True}
PARAMS: dict[str, Any] = {"remote_request_id": "x"}


class Peers(Connector):
    """Remembers what it is told, answers what a test says."""

    def __init__(self, answer: Any = PARAMS, leave_away: Any = 0) -> None:
        super().__init__()
        self.answer, self.leave_away = answer, leave_away
        self.came: list[tuple[str, int]] = []
        self.left: list[tuple[str, tuple[list[int], ...], int]] = []

    def meet(self, introductions: Mapping[int, bytes]) -> None: ...

    def arrived(self, request: Any) -> Any:
        self.came.append((request.request_id, request.num_tokens))
        return _said(self.leave_away)

    def lookup(self, request: Any, num_local_tokens: int) -> Lookup:
        assert request.request_id in [name for name, _ in self.came]
        return super().lookup(request, num_local_tokens)

    def handover(
        self, request: Any, block_ids: tuple[Sequence[int], ...], computed: int
    ) -> Any:
        assert request.request_id not in self.ended  # said right before `finished`
        rows = tuple(map(list, block_ids))
        self.left.append((request.request_id, rows, computed))
        return _said(self.answer)


def _said(answer: Any) -> Any:
    return answer() if callable(answer) else answer


def fails() -> None:
    raise KeyError("no idea")


def meeting(*args: Any, answer: Any = PARAMS, **settings: Any) -> Harness:
    return Harness(*args, connector=Peers(answer), **settings)


# -- who is asked, and when ------------------------------------------------------------


def test_a_request_that_ends_as_it_should_is_handed_over_with_its_row() -> None:
    engine = meeting()
    engine.add("a", range(10), 3)
    engine.step()
    engine.step()
    (row,) = engine.rows("a")
    engine.run()
    assert engine.connector.came == [("a", 10)]
    # The last of its 13 tokens was sampled, not computed.
    assert engine.connector.left == [("a", (row,), 12)]
    assert engine.handed_over == {"a": PARAMS}
    assert engine.connector.ended == ["a"]
    assert engine.is_idle()


def test_a_stop_token_ends_it_as_well() -> None:
    engine = meeting(drafts=3)
    request = engine.add("a", range(10), 8)
    stop = next_token(range(10))
    engine.scheduler.requests["a"].stop_token_ids = frozenset([stop])
    engine.run()
    assert engine.reasons == {"a": "stop"}
    ((_, _, computed),) = engine.connector.left
    assert computed == 10
    assert request.num_tokens == 11


@pytest.mark.parametrize("status", ["waiting", "loading", "loaded", "running"])
def test_an_aborted_request_hands_over_nothing(status: str) -> None:
    engine = meeting()
    if status.startswith("load"):
        engine.connector.offers["a"] = 16
    engine.add("a", range(20), 5)
    if status != "waiting":
        engine.step()
    if status == "loaded":
        engine.step(WorkerOutcome(finished_loads=frozenset(["a"])))
        engine.schedule()  # it runs in this step
    engine.scheduler.abort_request("a")
    while engine.in_flight:
        engine.land()
    engine.step(WorkerOutcome(finished_loads=frozenset(["a"])))
    engine.run()
    assert engine.reasons == {"a": "abort"}
    assert engine.connector.left == []
    assert engine.handed_over == {"a": None}
    assert engine.is_idle()


def test_a_failed_request_hands_over_nothing() -> None:
    engine = meeting(kv_load_failure_policy="fail")
    engine.connector.offers["a"] = 16
    engine.add("a", range(20), 5)
    engine.step()
    engine.step(WorkerOutcome(finished_loads=frozenset(["a"]), failed_loads={"a": [1]}))
    engine.run()
    assert engine.reasons == {"a": "error"}
    assert engine.connector.left == []
    assert engine.is_idle()


def test_a_connector_that_meets_nobody_is_asked_nothing() -> None:
    engine = Harness(connects=True)
    assert not isinstance(engine.connector, MeetsPeers)
    engine.add("a", range(10))
    engine.run()
    assert engine.handed_over == {"a": None}


# -- what is left away -----------------------------------------------------------------


def test_the_end_of_a_prompt_is_left_away() -> None:
    engine = Harness(connector=Peers(leave_away=1))
    request = engine.add("a", range(9), 1)
    assert (request.num_prompt_tokens, request.num_tokens) == (8, 8)
    assert len(request.block_hashes) == 2
    engine.run()
    assert engine.outputs["a"] == [next_token(range(8))]
    (left,) = engine.connector.left
    assert left[2] == 8
    engine.connector.leave_away = 0
    engine.add("b", range(8), 1)
    assert engine.step().num_scheduled_tokens == {"b": 4}, "the last block is new"
    engine.run()
    assert engine.is_idle()


# -- answers that cannot be ------------------------------------------------------------

WRONG: dict[str, Any] = {
    "no mapping": ["do_remote_prefill"],
    "text": "yes",
    "True": True,
    "keys that are no text": {1: 2},
    "an error": fails,
}


@pytest.mark.parametrize("answer", WRONG.values(), ids=WRONG)
def test_an_impossible_handover_is_none_and_told_once(
    answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine = meeting(answer=answer)
    for name in "abc":
        engine.add(name, range(10), 2)
        engine.run()
    assert engine.reasons == dict.fromkeys("abc", "length")
    assert engine.handed_over == dict.fromkeys("abc")
    (record,) = caplog.records
    assert "Peers.handover: " in record.getMessage()
    assert engine.is_idle()


@pytest.mark.parametrize("answer", [-1, 10, 11, 1.0, True, None, "1", fails])
def test_an_impossible_number_to_leave_away_is_0_and_told_once(
    answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Harness(connector=Peers(leave_away=answer))
    for name in "abc":
        assert engine.add(name, range(10), 2).num_tokens == 10
        engine.run()
        assert engine.outputs[name][0] == next_token(range(10))
    (record,) = caplog.records
    assert "Peers.arrived: " in record.getMessage()


# -- rows that a step in flight still changes ------------------------------------------


def _preempt_by_reset(engine: Harness) -> None:
    engine.scheduler.reset_prefix_cache(reset_running=True)


def _preempt_for_room(engine: Harness) -> None:
    """Its neighbour, which came first, needs the last block that there is."""
    engine.schedule()


@pytest.mark.parametrize("preempt", [_preempt_by_reset, _preempt_for_room])
def test_scenario_42_a_request_preempted_in_its_last_step_is_computed_again(
    preempt: Callable[[Harness], None],
) -> None:
    """Its last token is sampled by a step in flight, its blocks are gone: that token
    is discarded, and handed over is the row of the step that samples it again."""
    engine = meeting(6, pipeline_depth=2)
    engine.add("first", range(50, 61), 8)
    engine.schedule()
    engine.add("a", range(12), 1)  # samples its only token in the next step
    engine.schedule()
    engine.land()
    preempt(engine)
    assert engine.scheduler.requests["a"].request.num_preemptions == 1
    engine.run()
    assert engine.outputs["a"] == [next_token(range(12))]
    for name, (row,), computed in engine.connector.left:
        assert all(row[: -(-computed // 4)]), f"{name} handed over lost blocks"
    assert dict(engine.handed_over) == {"a": PARAMS, "first": PARAMS}
    assert engine.is_idle()


def test_a_step_in_flight_adds_nothing_to_what_is_handed_over() -> None:
    """It was stopped by a token that came out of the step before."""
    engine = meeting(pipeline_depth=2)
    request = engine.add("a", range(10), 8)
    stop = next_token(range(10))
    engine.scheduler.requests["a"].stop_token_ids = frozenset([stop])
    engine.schedule()
    engine.schedule()
    assert request.num_computed_tokens == 11
    engine.land()
    ((_, _, computed),) = engine.connector.left
    assert computed == 10
    engine.run()
    assert engine.is_idle()


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_state_that_a_step_in_flight_moves_on_is_not_handed_over(
    in_flight: bool,
) -> None:
    engine = meeting(
        20, [full(), mamba("align")], pipeline_depth=2, max_num_batched_tokens=64
    )
    engine.add("a", range(8), 8 if in_flight else 1)
    stop = next_token(range(8))
    engine.scheduler.requests["a"].stop_token_ids = frozenset([stop])
    engine.schedule()
    engine.schedule()
    engine.land()
    ((_, rows, computed),) = engine.connector.left
    assert computed == 8
    assert all(rows[0][:2])
    assert bool(rows[1][1]) is not in_flight
    engine.run()
    assert engine.is_idle()


# -- two engines -----------------------------------------------------------------------

MIXES: dict[str, Any] = {
    "full": ([full()], [full()]),
    "blocks of other sizes": ([full(8)], [full(4)]),
    "full+window": ([full(), window(6)], [full(), window(6)]),
    "full+states": ([full(), mamba("align")], [full(), mamba("align")]),
}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("prefilled", [9, 16, 30])
@pytest.mark.parametrize("mix", MIXES)
def test_what_one_engine_computes_another_goes_on_with(
    mix: str, prefilled: int, depth: int
) -> None:
    theirs, ours = MIXES[mix]
    prefill, decode = PeerLab(theirs, 20, depth=depth), PeerLab(ours, 20, depth=depth)
    decode.peers.knows(prefill.peers)
    prompt = list(range(prefilled))
    if "states" in mix:
        prefill.peers.leaves_away = 1
    first = prefill.add(prompt, 1, kv_transfer_params=HANDS_OVER)
    prefill.finish(first)
    params = prefill.handed_over[first]
    second = decode.add(prompt, 5, kv_transfer_params=params)
    decode.drain()
    (load,) = decode.peers.loads.values()
    assert load.stop == prefilled - 1
    assert decode.reasons == {second: "length"}
    assert prefill.scheduler.has_work(), "its blocks are kept"
    prefill.peers.release(first)
    prefill.drain()


def test_blocks_that_are_given_back_too_early_are_noticed() -> None:
    """What these tests can see: a producer whose blocks are somebody else's by the
    time they are read."""
    prefill, decode = PeerLab([full()], 8), PeerLab([full()], 20)
    decode.peers.knows(prefill.peers)
    first = prefill.add(list(range(20)), 1, kv_transfer_params=HANDS_OVER)
    prefill.finish(first)
    prefill.peers.release(first)
    prefill.run()
    prefill.add(list(range(100, 130)), 1)
    prefill.run()
    params = prefill.handed_over[first]
    decode.add(list(range(20)), 5, kv_transfer_params=params)
    with pytest.raises(ContentError):
        decode.drain()


def test_a_request_is_taken_over_once() -> None:
    """Preempted after its load, it computes: what it has loaded may be gone by then."""
    prefill, decode = PeerLab([full()], 20), PeerLab([full()], 20)
    decode.peers.knows(prefill.peers)
    first = prefill.add(list(range(20)), 1, kv_transfer_params=HANDS_OVER)
    prefill.finish(first)
    params = prefill.handed_over[first]
    second = decode.add(list(range(20)), 8, kv_transfer_params=params)
    while len(decode.outputs[second]) < 2:
        decode.step()
    prefill.peers.release(first)
    prefill.drain()
    decode.scheduler.reset_prefix_cache(reset_running=True)
    decode.drain()
    assert len(decode.peers.loads) == 1
