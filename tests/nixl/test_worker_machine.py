"""Any sequence of plans, ends of reads, and polls: each order ends once, is told once,
and nothing is announced before its generations are set."""

from collections.abc import Callable, Iterable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvplugin.connectors.nixl.messages import Completion, GroupRead, Peer, ReadOrder
from tests.nixl.ranks import GroupSpec, Rank, RankSpec, ends, order

BLOCKS = 32
SPEC = RankSpec("reader", (GroupSpec(),), BLOCKS, config={"backends": []})


class HeldReads:
    """Implements `Reads`: a read ends when the test says so."""

    def __init__(self) -> None:
        self.known: set[str] = set()
        self.held: dict[int, ReadOrder] = {}
        self.stopped: set[int] = set()
        self.ended: list[Completion] = []
        self.is_closed = False

    def meet(self, peer_id: str, descriptor: bytes) -> None:
        self.known.add(peer_id)

    def leave(self, peer_id: str) -> None:
        self.known.discard(peer_id)

    def submit(self, wanted: ReadOrder, after: Callable[[], None]) -> None:
        assert wanted.peer_id in self.known
        assert not self.is_closed
        assert all(0 < block < BLOCKS for block in wanted.engine_ids)
        self.held[wanted.id] = wanted

    def stop(self, ids: Iterable[int]) -> None:
        self.stopped.update(ids)

    def poll(self, wait: float) -> list[Completion]:
        ended, self.ended = self.ended, []
        return ended

    def close(self) -> bool:
        self.is_closed = True
        return not self.held


class WorkerMachine(RuleBasedStateMachine):
    """A worker half whose reads the rules end."""

    @initialize()
    def start(self) -> None:
        self.reads = HeldReads()
        self.rank = Rank(SPEC, make_reads=lambda memory, readers: self.reads)
        self.peers: set[str] = set()
        self.number = 0
        self.blocks: dict[str, list[int]] = {}
        """Of every order ever made, by request."""
        self.said: dict[int, str] = {}
        """How orders ended, as reported."""
        self.given_up: set[int] = set()
        self.told: dict[str, bool] = {}
        """What the engine heard: whether it failed."""
        self.results: dict[int, str] = {}
        """How reads ended, or orders were refused for the first reason."""
        self.generations = [0] * BLOCKS
        self.awaited: dict[str, list[tuple[int, int]]] = {}
        """Sends not announced yet, with what must be set by then."""
        self.is_closed = False

    # -- plans ---------------------------------------------------------------------

    @rule(peer=st.sampled_from("abc"), comes=st.booleans())
    def peer(self, peer: str, comes: bool) -> None:
        if comes:
            self.rank.step(peers=[Peer(peer, b"")])
            if not self.is_closed:
                self.peers.add(peer)
        else:
            self.rank.step(gone=[peer])
            self.peers.discard(peer)

    @rule(
        peer=st.sampled_from("abcd"),
        ids=st.lists(st.integers(-1, BLOCKS), min_size=1, max_size=4),
        again=st.booleans(),
    )
    def read(self, peer: str, ids: list[int], again: bool) -> None:
        self.number += 1
        part = GroupRead(0, 0, 16 * len(ids), [1] * len(ids), ids)
        wanted = order(self.number, Peer(peer, b""), [part])
        self.blocks[wanted.request_id] = ids
        fits = len(set(ids)) == len(ids) and all(0 < i < BLOCKS for i in ids)
        plan = self.rank.step(reads=[wanted])
        if again:
            self.rank.worker.begin_step(plan)
        if self.is_closed or peer not in self.peers or not fits:
            assert wanted.id not in self.reads.held
            self.results[wanted.id] = "refused"
        else:
            assert wanted.id in self.reads.held

    @rule(ids=st.lists(st.integers(1, 12), max_size=3))
    def give_up(self, ids: list[int]) -> None:
        self.rank.step(given_up=ids)
        self.given_up |= {i for i in ids if i <= self.number and i not in self.said}
        assert self.reads.stopped >= self.given_up - self.results.keys()

    @rule(
        blocks=st.lists(st.integers(1, BLOCKS - 1), max_size=4, unique=True),
        name=st.sampled_from(["s1", "s2", "s3"]),
    )
    def lease_ends(self, blocks: list[int], name: str) -> None:
        changes = []
        for block in blocks:
            self.generations[block] += 1
            changes.append((block, self.generations[block]))
        self.rank.step(generations=changes, sends=[name])
        self.awaited.setdefault(name, []).extend(changes)

    # -- the world -----------------------------------------------------------------

    @rule(data=st.data(), error=st.sampled_from(["", "broken"]), lost=st.booleans())
    def read_ends(self, data: st.DataObject, error: str, lost: bool) -> None:
        if not self.reads.held:
            return
        order_id = data.draw(st.sampled_from(sorted(self.reads.held)))
        del self.reads.held[order_id]
        self.results[order_id] = error
        end = Completion(order_id, error, 64, 0.5, bool(error) and lost)
        self.reads.ended.append(end)

    @rule()
    def poll(self) -> None:
        outcome = self.rank.worker.poll()
        for order_id, end in ends(outcome).items():
            assert order_id not in self.said, "an order ends once"
            wanted = self.results[order_id]
            assert bool(end.error) == bool(wanted)
            self.said[order_id] = end.error
        for request in outcome.finished_loads:
            assert request not in self.told, "the engine hears once"
            self.told[request] = request in outcome.failed_loads
        assert outcome.failed_loads.keys() <= outcome.finished_loads
        for request, blocks in outcome.failed_loads.items():
            assert list(blocks) == self.blocks[request]
        for order_id in self.said.keys() | self.given_up:
            failed = self.told[f"r{order_id}"]
            assert failed or not self.results[order_id]
            assert not failed or order_id in self.given_up or self.results[order_id]
        for name in outcome.finished_sends:
            for block, generation in self.awaited.pop(name):
                assert self.rank.worker._registered.generations[block] >= generation
        assert not self.awaited, "said at the next poll"

    @rule()
    def drain(self) -> None:
        assert self.rank.worker.drain() == b""

    @rule()
    def close(self) -> None:
        self.is_closed = True
        self.rank.worker.close()

    # -- always --------------------------------------------------------------------

    @invariant()
    def the_array_is_as_planned(self) -> None:
        found = self.rank.worker._registered.generations
        assert found[0] == self.rank.worker._registered.rank.incarnation > 0
        assert found[1:].tolist() == self.generations[1:]

    @invariant()
    def what_has_not_ended_is_not_said(self) -> None:
        assert not self.said.keys() & self.reads.held.keys()

    def teardown(self) -> None:
        for order_id in list(self.reads.held):
            self.results[order_id] = ""
            self.reads.ended.append(Completion(order_id, "", 64, 0.5, False))
        self.reads.held.clear()
        self.poll()
        assert self.said.keys() == set(range(1, self.number + 1))
        assert self.told.keys() == self.blocks.keys()
        self.rank.worker.close()


TestWorkerMachine = WorkerMachine.TestCase
TestWorkerMachine.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)
