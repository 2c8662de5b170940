"""Producers and a consumer under random traffic, delay, loss, crashes and restarts.

The lab asserts, whatever happens: nothing wrong is consumed, no request waits longer
than `handshake_timeout_s`, nothing is read twice, every reference has an owner. At the
end everything has come back on every side.
"""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
)

from kvplugin.connectors.nixl.config import Role
from tests.nixl.lab import LEASE, Clock, Engine, Network, spec

LENGTHS = st.integers(2, 40)
PRODUCERS = st.integers(0, 1)
SETUPS = [
    ((4,), (4,), 1),
    ((4,), (8,), 1),
    ((8,), (4,), 2),
    ((4, 4), (8, 8), 1),
    ((8, 4), (4, 8), 1),
]


class Machine(RuleBasedStateMachine):
    """Two producers, one consumer."""

    @initialize(setup=st.sampled_from(SETUPS), both=st.booleans())
    def start(self, setup: tuple[Any, Any, int], both: bool) -> None:
        self.theirs, self.ours, self.ranks = setup
        self.network = Network(Clock())
        self.role = Role.BOTH if both else Role.CONSUMER
        self.names = 0
        self.handed: list[tuple[list[int], Mapping[str, Any]]] = []
        self.producers = [self._producer(0, "P0"), self._producer(1, "P1")]
        self.consumer = self._consumer()
        self.graves: list[Engine] = []

    def _producer(self, index: int, name: str) -> Engine:
        made = spec(name, *self.theirs, window=10, num_blocks=40)
        return Engine(self.network, made, Role.PRODUCER, 5600 + index)

    def _consumer(self) -> Engine:
        made = spec("D", *self.ours, window=10, num_blocks=40, ranks=self.ranks)
        return Engine(self.network, made, self.role, 5700)

    def _name(self) -> str:
        self.names += 1
        return f"r{self.names}"

    @property
    def engines(self) -> list[Engine]:
        return [*self.producers, self.consumer]

    # -- traffic -------------------------------------------------------------------

    def prefill(self, index: int, length: int, seed: int) -> None:
        tokens = [100 * seed + i for i in range(length)]
        producer = self.producers[index]
        request = producer.add(self._name(), tokens, {"do_remote_decode": True})
        producer.step()
        if request.params is not None:
            self.handed.append((tokens, request.params))

    @rule(
        index=PRODUCERS,
        length=LENGTHS,
        seed=st.integers(0, 2),
        now=st.integers(0, 3),
        age=st.integers(0, 3),
        wrong=st.integers(0, 15),
        tail=st.integers(0, 6),
        readers=st.sampled_from([1, 1, 1, 2]),
        says_arrived=st.booleans(),
    )
    def serve(
        self,
        index: int,
        length: int,
        seed: int,
        now: int,
        age: int,
        wrong: int,
        tail: int,
        readers: int,
        says_arrived: bool,
    ) -> None:
        """A prompt goes to a producer, and that or an older one on to the consumer."""
        self.prefill(index, length, seed)
        if not (now and self.handed):
            return
        tokens, params = self.handed[max(len(self.handed) - 1 - age, 0)]
        tokens = [*tokens, *range(900, 900 + tail)]
        if wrong == 1:
            tokens[len(tokens) // 2] = 7
        if wrong == 2:
            params = {**params, "remote_engine_id": "other"}
        for _ in range(readers):
            name = self._name()
            self.consumer.add(name, tokens, params, says_arrived=says_arrived)

    @rule(index=st.sampled_from([0, 1, 2, 2, 2]))
    def step(self, index: int) -> None:
        self.engines[index].step()

    @rule(count=st.integers(1, 3))
    def go_on(self, count: int) -> None:
        """As it should be."""
        for _ in range(count):
            self.consumer.step()
            self.consumer.read_all()

    @precondition(lambda self: self.consumer.waiting or self.consumer.loading)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        alive = [*self.consumer.waiting, *self.consumer.loading.values()]
        alive = [request for request in alive if not request.is_aborted]
        if alive:
            which = data.draw(st.integers(0, len(alive) - 1))
            self.consumer.abort(alive[which])

    # -- reads ---------------------------------------------------------------------

    @precondition(lambda self: self.consumer.reads())
    @rule(data=st.data(), what=st.sampled_from(["go on"] * 4 + ["fail"]))
    def read(self, data: st.DataObject, what: str) -> None:
        reads = self.consumer.reads()
        worker, read = reads[data.draw(st.integers(0, len(reads) - 1))]
        if what == "fail":
            worker.finish(read, error="a cable")
        elif worker.readings[read].sampled:
            worker.verify(read)
        else:
            worker.sample(read)

    # -- the network, and time -----------------------------------------------------

    @rule(seconds=st.sampled_from([0.5, 2.0, 6.0, LEASE + 1, 70.0]))
    def wait(self, seconds: float) -> None:
        until = self.network.clock.now + seconds
        while self.network.clock.now < until:
            left = until - self.network.clock.now
            self.network.clock.now += min(left, LEASE / 6)
            self.consumer.channel.renew()

    @rule(holds=st.booleans())
    def hold(self, holds: bool) -> None:
        self.network.holds = holds

    @precondition(lambda self: self.consumer.channel.asked)
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        asked = self.consumer.channel.asked
        channel = self.consumer.channel
        channel.deliver(asked[data.draw(st.integers(0, len(asked) - 1))])

    @rule()
    def closes(self) -> None:
        self.consumer.channel.send_closes()

    @rule(index=PRODUCERS, silent=st.sampled_from([True, False, False]))
    def silence(self, index: int, silent: bool) -> None:
        change = self.network.silent.add if silent else self.network.silent.discard
        change(self.producers[index].address)

    # -- disasters -----------------------------------------------------------------

    @rule(
        index=st.integers(0, 2),
        block=st.integers(1, 39),
        what=st.sampled_from(["none"] * 6 + ["restart", "rename", "crash"])
        | st.sampled_from(["reset", "distrust"]),
    )
    def disaster(self, index: int, block: int, what: str) -> None:
        if what in ("restart", "rename"):
            self.producers[index % 2].crash()
            name = f"P{index % 2}" + f"/{self._name()}" * (what == "rename")
            self.producers[index % 2] = self._producer(index % 2, name)
        elif what == "crash":
            self.consumer.crash()
            self.consumer = self._consumer()
        elif what == "reset":
            engine = self.engines[index]
            assert engine.half.reset() == (not self._awaited(engine))
        elif what == "distrust":
            self.producers[index % 2].half.distrust({block})

    def _awaited(self, engine: Engine) -> bool:
        pulls = engine.half._pulls
        return pulls is not None and any(pulls.reads.awaited)

    # -- the end -------------------------------------------------------------------

    def teardown(self) -> None:
        if not hasattr(self, "producers"):
            return
        self.network.holds = False
        self.network.silent.clear()
        for _ in range(300):  # leases that nobody reads run out one after the other
            if all(engine.is_idle for engine in self.engines):
                break
            for asked in list(self.consumer.channel.asked):
                self.consumer.channel.deliver(asked)
            self.consumer.channel.send_closes()
            for engine in self.engines:
                engine.step()
                engine.read_all()
            self.wait(5.0)
        self.consumer.channel.send_closes()
        for engine in self.engines:
            engine.check_idle()
            engine.half.close()


def run(examples: int, steps: int) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
            phases=[Phase.generate],  # shrinking takes minutes
        ),
    )


def test_whatever_happens_everything_comes_back_and_nothing_wrong_is_consumed() -> None:
    run(60, 40)


@pytest.mark.full
def test_for_longer() -> None:
    run(1500, 80)
