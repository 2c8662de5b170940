"""Leases: each request ends once, and no block changes under a reader."""

import re
import sys
import threading
import time
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvplugin.connectors.nixl.answers import EngineAnswers
from kvplugin.connectors.nixl.generations import FIRST
from kvplugin.connectors.nixl.lease import MOST_READERS
from kvplugin.connectors.nixl.leases import EndedLeases, Leases
from kvplugin.connectors.nixl.wire import (
    Close,
    Description,
    Gone,
    Granted,
    Health,
    Open,
    Renew,
)
from kvplugin.errors import IntegrityError

PROCESS = "engine-1/17"
SECONDS = 30.0


class Clock:
    """A clock that a test winds."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Desk:
    """Leases of a pool of 64 blocks, and short ways to use them."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.leases = Leases(64, self.clock)
        self.array = [FIRST] * 64
        """As a worker keeps it."""

    def add(self, request: str, *rows: list[int], seconds: float = SECONDS) -> str:
        return self.leases.add(request, rows, 100, [b"digest"], seconds)

    def open(self, lease: str, reader: str = "r") -> Any:
        return self.leases.open(Open(peer_id=PROCESS, lease=lease, reader=reader))

    def renew(self, *pairs: tuple[str, str]) -> list[str]:
        return self.leases.renew(Renew(leases=list(pairs))).gone

    def close(self, lease: str, reader: str = "r") -> None:
        self.leases.close(Close(lease=lease, reader=reader))

    def ended(self) -> EndedLeases:
        ended = self.leases.ended()
        for block, generation in ended.generations:
            assert generation > self.array[block]
            self.array[block] = generation
        self.leases.check()
        return ended


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_a_reader_is_told_all_it_needs(desk: Desk) -> None:
    lease = desk.add("req", [3, 4, 0], [9])
    granted = desk.open(lease)
    assert granted == Granted(
        num_tokens=100,
        block_ids=[[3, 4, 0], [9]],
        generations=[[FIRST, FIRST, FIRST], [FIRST]],
        token_digests=[b"digest"],
        seconds=SECONDS,
    )
    assert desk.leases.num_blocks == 3
    assert desk.ended() == EndedLeases([], [], [], [], [])


def test_a_lease_ends_when_its_reader_closes_it(desk: Desk) -> None:
    lease = desk.add("req", [3, 4])
    desk.open(lease)
    assert desk.leases.holds("req")
    desk.close(lease)
    assert desk.leases.holds("req")  # until somebody has collected it
    assert desk.ended() == EndedLeases(["req"], [(3, 1), (4, 1)], ["req"], [], [])
    assert not desk.leases.holds("req")
    assert desk.ended() == EndedLeases([], [], [], [], [])
    assert isinstance(desk.open(lease, "another"), Gone)
    assert len(desk.leases) == desk.leases.num_blocks == 0


def test_a_lease_with_several_readers_ends_with_the_last(desk: Desk) -> None:
    lease = desk.add("req", [3])
    for reader in "abc":
        assert isinstance(desk.open(lease, reader), Granted)
    desk.close(lease, "a")
    desk.close(lease, "a")
    desk.close(lease, "c")
    assert not desk.ended().request_ids
    desk.close(lease, "b")
    assert desk.ended().request_ids == ["req"]


def test_a_reader_that_gives_up_before_it_opens_frees_the_blocks(desk: Desk) -> None:
    lease = desk.add("req", [3])
    desk.close(lease)
    assert desk.ended().closed == ["req"]


def test_a_question_overtaken_by_its_farewell_opens_nothing(desk: Desk) -> None:
    lease = desk.add("req", [3])
    desk.open(lease, "stays")
    desk.close(lease, "left")
    assert isinstance(desk.open(lease, "left"), Gone)
    desk.close(lease, "stays")
    assert desk.ended().request_ids == ["req"]


def test_nobody_reads_and_the_lease_runs_out_at_its_end_not_later(desk: Desk) -> None:
    """Scenario 25: cancelled before the consumer knew of the request."""
    desk.add("req", [3])
    desk.clock.now += SECONDS - 0.01
    assert not desk.ended().request_ids
    desk.clock.now += 0.01
    assert desk.ended() == EndedLeases(["req"], [(3, 1)], [], ["req"], [])


def test_a_renewed_lease_lives_and_an_abandoned_one_does_not(desk: Desk) -> None:
    """Scenario 25: heartbeats keep it alive; at 31 ticks without one it is gone, and
    a read at 51 finds blocks of another generation."""
    lease = desk.add("req", [3])
    granted = desk.open(lease)
    for _ in range(10):
        desk.clock.now += SECONDS - 1
        assert desk.renew((lease, "r")) == []
        assert not desk.ended().request_ids
    desk.clock.now += 31
    assert desk.renew((lease, "r")) == [lease]
    assert desk.ended().expired == ["req"]
    desk.clock.now += 20
    assert isinstance(desk.open(lease), Gone)
    assert desk.array[3] != granted.generations[0][0]


def test_opening_lets_a_lease_run_anew(desk: Desk) -> None:
    lease = desk.add("req", [3])
    desk.clock.now += SECONDS - 1
    desk.open(lease)
    desk.clock.now += SECONDS - 1
    assert desk.renew((lease, "r")) == []


def test_a_lease_that_has_run_out_is_gone_before_anybody_looked(desk: Desk) -> None:
    lease = desk.add("req", [3])
    desk.clock.now += SECONDS
    assert isinstance(desk.open(lease), Gone)
    assert desk.ended().expired == ["req"]


def test_only_who_has_opened_a_lease_renews_it(desk: Desk) -> None:
    lease = desk.add("req", [3])
    desk.open(lease, "r")
    other = desk.add("other", [4])
    assert desk.renew((lease, "x"), (other, "r"), (lease, "r")) == [lease, other]
    desk.close(other, "r")
    desk.open(lease, "s")
    desk.close(lease, "r")
    assert desk.renew((lease, "r")) == [lease]


def test_a_block_of_two_leases_changes_with_the_last(desk: Desk) -> None:
    one, two = desk.add("one", [3, 4]), desk.add("two", [3, 5])
    desk.open(two)
    desk.close(one)
    assert desk.ended().generations == [(4, 1)]
    desk.clock.now += SECONDS
    assert desk.ended().generations == [(3, 1), (5, 1)]


def test_a_block_of_two_leases_that_end_at_once_changes_once(desk: Desk) -> None:
    for name in ("one", "two"):
        desk.close(desk.add(name, [3]))
    assert desk.ended().generations == [(3, 1)]


def test_a_block_leased_again_before_it_is_collected_does_not_change(
    desk: Desk,
) -> None:
    desk.close(desk.add("one", [3, 4]))
    again = desk.add("two", [3, 5])
    granted = desk.open(again)
    assert desk.ended() == EndedLeases(["one"], [(4, 1)], ["one"], [], [])
    assert granted.generations == [[desk.array[3], desk.array[5]]]


def test_generations_go_on_growing(desk: Desk) -> None:
    for generation in range(1, 5):
        lease = desk.add("req", [7])
        assert desk.open(lease).generations == [[generation - 1]]
        desk.close(lease)
        assert desk.ended().generations == [(7, generation)]


def test_the_null_block_is_nobodys(desk: Desk) -> None:
    desk.close(desk.add("req", [0, 0, 5], [0]))
    assert desk.ended().generations == [(5, 1)]


@pytest.mark.parametrize("meant", ["engine-0/17", "engine-1/16"])
def test_another_process_at_this_address_grants_nothing(desk: Desk, meant: str) -> None:
    """Another engine, or the same one before it was restarted."""
    lease = desk.add("req", [3])
    answers = EngineAnswers(PROCESS, Description(descriptor=b""), desk.leases, _unasked)
    gone = answers.open(Open(peer_id=meant, lease=lease, reader="r"))
    assert isinstance(gone, Gone)
    assert f"this is {PROCESS}, not {meant}" in gone.reason
    granted = answers.open(Open(peer_id=PROCESS, lease=lease, reader="r"))
    assert isinstance(granted, Granted)


def _unasked() -> Health:
    raise AssertionError


def test_names_cannot_be_guessed_and_can_travel(desk: Desk) -> None:
    hostile = "req\n\x00 \ud800é" + "x" * 10_000
    names = []
    for _ in range(20):
        names.append(desk.add(hostile, [3]))
        desk.close(names[-1])
        assert desk.ended().request_ids == [hostile]
    assert len({name[-32:] for name in names}) == 20
    for name in names:
        assert re.fullmatch(r"[!-~]{1,200}-[0-9a-f]{32}", name)
        assert isinstance(desk.open(name[:-1] + "g"), Gone)


def test_a_request_has_one_lease_and_blocks(desk: Desk) -> None:
    desk.add("req", [3])
    with pytest.raises(IntegrityError, match="req"):
        desk.add("req", [4])
    with pytest.raises(IntegrityError, match="without blocks"):
        desk.add("other", [0], [])
    desk.leases.check()
    assert desk.leases.num_blocks == 1


def test_readers_are_bounded(desk: Desk) -> None:
    lease = desk.add("req", [3])
    for number in range(MOST_READERS):
        assert isinstance(desk.open(lease, f"r{number}"), Granted)
    assert isinstance(desk.open(lease, "one more"), Gone)
    assert isinstance(desk.open(lease, "r0"), Granted)  # it has opened it already
    for number in range(2 * MOST_READERS):
        desk.close(lease, f"x{number}")  # they never opened it
    (held,) = desk.leases._leases.values()
    assert len(held.open_by | held.closed_by) == MOST_READERS
    assert not desk.ended().request_ids
    for number in range(MOST_READERS):
        desk.close(lease, f"r{number}")
    assert desk.ended().request_ids == ["req"]


def test_leases_of_distrusted_blocks_end_at_once(desk: Desk) -> None:
    bad, good = desk.add("bad", [3, 4]), desk.add("good", [5])
    desk.open(bad)
    desk.open(good)
    desk.leases.revoke({4, 60})
    assert desk.renew((bad, "r"), (good, "r")) == [bad]
    assert desk.ended() == EndedLeases(["bad"], [(3, 1), (4, 1)], [], [], ["bad"])
    desk.leases.revoke()
    assert desk.ended().request_ids == ["good"]


class LeaseMachine(RuleBasedStateMachine):
    """An engine and readers take turns; a plain model says what must be true."""

    def __init__(self) -> None:
        super().__init__()
        self.desk = Desk()
        self.numbers = 0
        self.live: dict[str, dict[str, Any]] = {}
        """Leases that have not ended, by name."""
        self.due: dict[str, bool] = {}
        """Requests whose end is to be named, and whether they ran out."""
        self.due_blocks: list[set[int]] = []
        self.gone: list[str] = []
        self.told: list[str] = []

    # -- the model -----------------------------------------------------------------

    def expire(self) -> None:
        for name, lease in list(self.live.items()):
            if self.desk.clock.now >= lease["deadline"]:
                self.end(name, expired=True)

    def end(self, name: str, *, expired: bool) -> None:
        lease = self.live.pop(name)
        self.due[lease["request"]] = expired
        self.due_blocks.append(lease["blocks"])
        self.gone.append(name)

    # -- the engine ----------------------------------------------------------------

    @rule(
        blocks=st.sets(st.integers(1, 12), min_size=1, max_size=5),
        seconds=st.sampled_from([1.0, 5.0, 30.0]),
    )
    def add(self, blocks: set[int], seconds: float) -> None:
        self.numbers += 1
        request = f"req-{self.numbers}"
        name = self.desk.add(request, sorted(blocks), seconds=seconds)
        assert name not in self.live
        assert name not in self.gone
        self.live[name] = {
            "request": request,
            "blocks": blocks,
            "seconds": seconds,
            "deadline": self.desk.clock.now + seconds,
            "open": set(),
            "closed": set(),
            "generations": [self.desk.array[block] for block in sorted(blocks)],
        }

    @rule(seconds=st.sampled_from([0.5, 1.0, 4.0, 29.0, 100.0]))
    def wait(self, seconds: float) -> None:
        self.desk.clock.now += seconds

    @rule()
    def collect(self) -> None:
        self.expire()
        before = list(self.desk.array)
        ended = self.desk.ended()
        assert sorted(ended.request_ids) == sorted(self.due)
        assert sorted(ended.expired) == sorted(
            x for x, late in self.due.items() if late
        )
        assert sorted(ended.expired + ended.closed) == sorted(ended.request_ids)
        held = set().union(*(lease["blocks"] for lease in self.live.values()))
        changed = set().union(*self.due_blocks) - held
        assert {block for block, _ in ended.generations} == changed
        assert len(ended.generations) == len(changed)
        for block, old in enumerate(before):
            assert self.desk.array[block] == old + (block in changed)
        self.told += ended.request_ids
        assert len(set(self.told)) == len(self.told)
        self.due, self.due_blocks = {}, []

    # -- readers -------------------------------------------------------------------

    def name(self, pick: int) -> str:
        names = [*self.live, *self.gone]
        return names[pick % len(names)] if names else "never-was"

    @rule(pick=st.integers(0, 1000), reader=st.sampled_from("abc"))
    def open(self, pick: int, reader: str) -> None:
        name = self.name(pick)
        self.expire()
        answer = self.desk.open(name, reader)
        lease = self.live.get(name)
        if lease is None or reader in lease["closed"]:
            assert isinstance(answer, Gone)
            return
        assert isinstance(answer, Granted)
        assert answer.generations == [lease["generations"]]
        assert answer.block_ids == [sorted(lease["blocks"])]
        lease["open"].add(reader)
        lease["deadline"] = self.desk.clock.now + lease["seconds"]

    @rule(
        picks=st.lists(st.integers(0, 1000), max_size=4), reader=st.sampled_from("ab")
    )
    def renew(self, picks: list[int], reader: str) -> None:
        names = [self.name(pick) for pick in picks]
        self.expire()
        gone = self.desk.renew(*((name, reader) for name in names))
        expected = []
        for name in names:
            lease = self.live.get(name)
            if lease is None or reader not in lease["open"]:
                expected.append(name)
            else:
                lease["deadline"] = self.desk.clock.now + lease["seconds"]
        assert gone == expected

    @rule(pick=st.integers(0, 1000), reader=st.sampled_from("abc"))
    def close(self, pick: int, reader: str) -> None:
        name = self.name(pick)
        self.expire()
        self.desk.close(name, reader)
        lease = self.live.get(name)
        if lease is not None:
            lease["open"].discard(reader)
            lease["closed"].add(reader)
            if not lease["open"]:
                self.end(name, expired=False)

    # -- always --------------------------------------------------------------------

    @invariant()
    def nothing_a_live_lease_names_has_changed(self) -> None:
        self.desk.leases.check()
        for lease in self.live.values():
            now = [self.desk.array[block] for block in sorted(lease["blocks"])]
            assert now == lease["generations"]
            assert self.desk.leases.holds(lease["request"])

    @precondition(lambda self: self.told)
    @invariant()
    def whoever_was_told_of_is_forgotten(self) -> None:
        assert not any(map(self.desk.leases.holds, self.told))

    def teardown(self) -> None:
        """In the end all come back, whatever readers do."""
        self.desk.clock.now += 1000
        self.collect()
        assert len(self.told) == self.numbers
        assert self.desk.leases.num_blocks == len(self.desk.leases) == 0


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None
)


ROUNDS = 500


class Hammer:
    """Three readers of the same leases, all closing at once, each on a thread."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.names: list[str] = []
        self.faults: list[str] = []
        self.together = threading.Barrier(3, timeout=60)
        self.threads = [
            threading.Thread(target=self.run, args=(reader,)) for reader in "abc"
        ]

    def run(self, reader: str) -> None:
        try:
            for number in range(ROUNDS):
                while len(self.names) <= number and not self.faults:
                    time.sleep(0)
                if self.faults:
                    return
                self.read(self.names[number], reader)
        except Exception as error:  # whatever it is, the test is to say so
            self.faults.append(repr(error))
            self.together.abort()

    def read(self, lease: str, reader: str) -> None:
        answer = self.desk.open(lease, reader)
        assert isinstance(answer, Granted)
        self.together.wait()
        assert not self.desk.renew((lease, reader))
        array = self.desk.array
        now = [[array[block] for block in row] for row in answer.block_ids]
        assert now == answer.generations
        self.together.wait()
        self.desk.close(lease, reader)


def test_an_engine_and_readers_at_the_same_time(desk: Desk) -> None:
    """Real threads: what is granted is never of blocks that have changed, and every
    request ends once."""
    hammer, before = Hammer(desk), sys.getswitchinterval()
    told: list[str] = []
    sys.setswitchinterval(1e-6)
    try:
        for thread in hammer.threads:
            thread.start()
        for number in range(ROUNDS):
            block = number % 20
            lease = desk.add(f"req-{number}", [block + 1, block + 2], [block + 30])
            hammer.names.append(lease)
            told += desk.ended().request_ids
        while any(thread.is_alive() for thread in hammer.threads):
            told += desk.ended().request_ids
    finally:
        sys.setswitchinterval(before)
    told += desk.ended().request_ids
    assert hammer.faults == []
    assert sorted(told) == sorted(f"req-{number}" for number in range(ROUNDS))
    assert desk.leases.num_blocks == 0
