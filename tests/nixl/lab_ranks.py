"""Ranks whose memory is an account, and whose reads go on when a test says so."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvplugin.connectors.nixl.messages import (
    VERSION,
    Completion,
    Plan,
    ReadOrder,
    Report,
)
from kvplugin.contract import WorkerOutcome
from kvplugin.wire import decode, encode

# -- memory and ranks ------------------------------------------------------------------


@dataclass
class Memory:
    """All ranks hold the same."""

    sizes: Sequence[int]
    num_blocks: int
    slots: dict[tuple[int, int], list[int | None]] = field(default_factory=dict)
    generations: dict[int, int] = field(default_factory=dict)

    def at(self, group: int, block: int) -> list[int | None]:
        return self.slots.setdefault((group, block), [None] * self.sizes[group])


@dataclass
class Reading:
    """A read on one rank."""

    order: ReadOrder
    sampled: bool = False
    given_up: bool = False
    told: bool = False
    end: Completion | None = None


class FakeWorker:
    """One rank's worker half: it reads when a test says so."""

    def __init__(self, engine: Any, rank: int) -> None:
        self.engine = engine
        self.rank = rank
        self.peers: set[str] = set()
        self.readings: dict[int, Reading] = {}
        self.ended: list[Completion] = []
        self.step = -1
        self.plans: list[Plan] = []
        self.seen: set[str] = set()
        """Requests that have had their read."""
        self.finished: set[str] = set()
        self.failed: dict[str, Sequence[int]] = {}
        self.sends: set[str] = set()
        self.tells = False

    def begin_step(self, data: bytes) -> None:
        if not data:
            return
        plan = decode(data, Plan)
        assert plan.step > self.step
        self.plans.append(plan)
        self.engine.memory.generations.update(plan.generations)
        self.step, self.tells = plan.step, True
        self.sends.update(plan.finished_sends)
        for peer in plan.new_peers:
            assert peer.peer_id not in self.peers, "introduced twice"
            self.peers.add(peer.peer_id)
        for order in plan.reads:
            assert order.refusal or order.peer_id in self.peers
            assert len(set(order.engine_ids)) == len(order.engine_ids)
            assert order.request_id not in self.seen, "read twice"
            self.seen.add(order.request_id)
            self.readings[order.id] = Reading(order)
            if order.refusal:
                self.finish(order.id, error=order.refusal)
        for read in plan.given_up:
            if read in self.readings:
                self.readings[read].given_up = True
        for peer_id in plan.gone_peers:
            self.peers.remove(peer_id)

    def sample(self, read: int) -> None:
        """The bytes arrive, as they are now."""
        reading = self.readings[read]
        source = self.engine.network.memories.get(reading.order.peer_id)
        if source is None:
            self.finish(read, error="the connection is lost")
            return
        for part in reading.order.parts:
            ours = self.engine.memory.sizes[part.group]
            theirs = source.sizes[part.group]
            for token in range(part.first_token, part.end_token):
                place = token // theirs - part.first_token // theirs
                slot = source.at(part.group, part.remote_ids[place])[token % theirs]
                block = part.local_ids[token // ours - part.first_token // ours]
                assert self.engine.pool.ref_count(block), "written after it was freed"
                self.engine.memory.at(part.group, block)[token % ours] = slot
        reading.sampled = True

    def verify(self, read: int) -> None:
        """The generations are read and compared."""
        order = self.readings[read].order
        source = self.engine.network.memories.get(order.peer_id)
        if source is None:
            self.finish(read, error="the connection is lost")
            return
        current = source.generations
        stale = any(current.get(block, 0) != said for block, said in order.generations)
        self.finish(read, error="stale" if stale else "", discarded=stale)

    def finish(self, read: int, *, error: str = "", discarded: bool = False) -> None:
        """It ends."""
        reading = self.readings.pop(read)
        reading.end = Completion(read, error, 0 if error else 100, 0.01, discarded)
        self.ended.append(reading.end)
        if not reading.told:
            self._heard(reading)

    def _heard(self, reading: Reading) -> None:
        self.finished.add(reading.order.request_id)
        if reading.given_up or (reading.end and reading.end.error):
            self.failed[reading.order.request_id] = reading.order.engine_ids
        reading.told = True

    def poll(self) -> WorkerOutcome:
        for reading in self.readings.values():
            if reading.given_up and not reading.told:
                self._heard(reading)
        if not (self.tells or self.ended or self.finished):
            return WorkerOutcome()
        report = encode(Report(VERSION, self.rank, self.step, self.ended))
        outcome = WorkerOutcome(
            frozenset(self.finished), self.failed, frozenset(self.sends), report
        )
        self.finished, self.failed, self.ended = set(), {}, []
        self.sends, self.tells = set(), False
        return outcome
