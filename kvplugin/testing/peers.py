"""Two engines that hand requests over, in one test: a connector that meets peers.

A `PeerKV` is a `RemoteKV` whose remote is another lab's memory. What a request of one
lab leaves behind, a request of another one loads from its blocks, as they are then: so
a block that is handed out too early is found, by whoever reads what it holds by then.

    prefill, decode = PeerLab([spec], 12), PeerLab([spec], 12)
    decode.peers.knows(prefill.peers)
    first = prefill.add(prompt, 1, kv_transfer_params={"do_remote_decode": True})
    prefill.finish(first)
    params = prefill.handed_over[first]          # for the client, then for the decoder
    second = decode.add([*prompt, *prefill.outputs[first]], 5,
                        kv_transfer_params=params)
    decode.drain()
    prefill.peers.release(first)                 # its blocks may go
    prefill.drain()
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvplugin.block import NULL_BLOCK
from kvplugin.contract import CopyJob, Lookup, WorkerHalf, WorkerOutcome
from kvplugin.spec import cdiv
from kvplugin.testing.content import ContentModel
from kvplugin.testing.faults import Fate, FaultyTransport
from kvplugin.testing.lab import Lab
from kvplugin.testing.progress import ProgressWatch
from kvplugin.testing.remote import RemoteKV, RemoteLoad, RemoteWorker
from kvplugin.testing.rules import GroupModel
from kvplugin.testing.slots import STATE_SLOT, BlockContent, Content, Void
from kvplugin.testing.transport import FakeTransport


@dataclass(frozen=True, slots=True)
class Handed:
    """What an ended request has left behind."""

    rows: tuple[list[int], ...]
    num_tokens: int
    """Whose KV the rows hold."""
    tokens: Sequence[int]
    """These."""
    memory: ContentModel

    def content(self, group: GroupModel, position: int, block_size: int) -> Content:
        """The bytes of one token, or the state after it, as they are now."""
        index, place = divmod(position, block_size)
        block = self.rows[group.index][index]
        if block == NULL_BLOCK:
            return Void.UNWRITTEN
        self.memory.store([block])  # nobody keeps the bytes of a free block
        return self.memory.content(block, place if group.keeps_tokens else STATE_SLOT)


class PeerKV(RemoteKV):
    """The scheduler half; a `MeetsPeers`.

    Args:
        leaves_away: what `arrived` answers for requests to be handed over.
    """

    def __init__(self, leaves_away: int = 0) -> None:
        super().__init__()
        self.name = f"peer-{id(self):x}"
        self.leaves_away = leaves_away
        self.memory: ContentModel
        """The engine's, from `execute` on."""
        self.introductions: Mapping[int, bytes] = {}
        self.came: list[str] = []
        """Requests that `arrived` was told of."""
        self.handed: dict[str, Handed] = {}
        self.released: list[str] = []
        self._wanted: dict[str, Handed] = {}
        self._taken: set[str] = set()
        self._known: dict[str, PeerKV] = {}

    def knows(self, *peers: "PeerKV") -> None:
        """Requests of these engines can be taken over."""
        self._known |= {peer.name: peer for peer in peers}

    def meet(self, introductions: Mapping[int, bytes]) -> None:
        """See `MeetsPeers`, as what follows."""
        self.introductions = introductions

    def arrived(self, request: Any) -> int:
        self.came.append(request.request_id)
        params = request.kv_transfer_params or {}
        peer = self._known.get(params.get("remote_engine_id", ""))
        if peer is not None:
            self._wanted[request.request_id] = peer.handed[params["remote_request_id"]]
        return self.leaves_away if params.get("do_remote_decode") else 0

    def handover(
        self,
        request: Any,
        block_ids: tuple[Sequence[int], ...],
        num_computed_tokens: int,
    ) -> Mapping[str, Any] | None:
        if not (request.kv_transfer_params or {}).get("do_remote_decode"):
            return None
        id_, tokens = request.request_id, request.all_token_ids[:num_computed_tokens]
        rows = tuple(map(list, block_ids))
        self.handed[id_] = Handed(rows, num_computed_tokens, tokens, self.memory)
        self.sends.add(id_)
        return {
            "do_remote_prefill": True,
            "remote_engine_id": self.name,
            "remote_request_id": id_,
            "remote_num_tokens": num_computed_tokens,
        }

    def release(self, request_id: str) -> None:
        """Nobody reads what the request has left behind any more: announced at the
        next `poll` of every rank."""
        self.sends.discard(request_id)
        self.released.append(request_id)

    def lookup(self, request: Any, num_local_tokens: int) -> Lookup:
        """See `SchedulerHalf`. Once a request, and all of it or nothing."""
        wanted, id_ = self._wanted.get(request.request_id), request.request_id
        if wanted is not None and id_ not in self._taken:
            fits = request.all_token_ids[: wanted.num_tokens] == wanted.tokens
            self.offers[id_] = wanted.num_tokens if fits else 0
        return super().lookup(request, num_local_tokens)

    def allocated(
        self,
        request: Any,
        block_ids: tuple[Sequence[int], ...],
        num_external_tokens: int,
    ) -> None:
        super().allocated(request, block_ids, num_external_tokens)
        if num_external_tokens:
            self.offers[request.request_id] = 0
            self._taken.add(request.request_id)

    def execute(self, memory: ContentModel) -> Callable[[CopyJob], int]:
        """See `RemoteKV`; the bytes come from the other engine's blocks."""
        self.memory = memory

        def move(job: CopyJob) -> int:
            load = self.loads[job.id]
            for index, blocks, entries in job.parts:
                group = memory.groups[index]
                payload = [self._content(load, group, entry) for entry in entries]
                memory.load(payload, blocks)
            return sum(len(blocks) for _, blocks, _ in job.parts)

        return move

    def _content(self, load: RemoteLoad, group: GroupModel, entry: int) -> BlockContent:
        handed = self._wanted[load.request_id]
        theirs, size = handed.memory.groups[group.index], group.block_size
        first, end = entry * size, min((entry + 1) * size, load.stop)
        positions = range(first, end) if group.keeps_tokens else range(end - 1, end)
        slots = {
            position - first if group.keeps_tokens else STATE_SLOT: handed.content(
                group, position, theirs.block_size
            )
            for position in positions
            if position // theirs.block_size
            < cdiv(handed.num_tokens, theirs.block_size)
        }
        return BlockContent(Void.UNWRITTEN, slots)


class PeerWorker(RemoteWorker):
    """The worker half of one rank.

    Args:
        peers: the scheduler half.
        memory: the rank's blocks.
        transport: its `execute` is `peers.execute(memory)`.
    """

    def __init__(
        self, peers: PeerKV, memory: ContentModel, transport: FakeTransport
    ) -> None:
        super().__init__(peers, memory, transport)
        self._peers, self._told = peers, 0

    def introduction(self) -> bytes:
        """See `IntroducesItself`."""
        return self._peers.name.encode()

    def poll(self) -> WorkerOutcome:
        self.sent.update(self._peers.released[self._told :])
        self._told = len(self._peers.released)
        return super().poll()


class PeerLab(Lab):
    """A lab that hands requests over to others, and takes them over."""

    def make_connector(self) -> PeerKV:
        """See `Lab`, as what follows."""
        self.peers = PeerKV()
        return self.peers

    def make_transport(self, fate_of: Callable[[CopyJob], Fate]) -> FakeTransport:
        return FaultyTransport(self.peers.execute(self.memory), fate_of)

    def make_workers(self, make_worker: Any) -> list[WorkerHalf]:
        del make_worker
        return [PeerWorker(self.peers, self.memory, self.transport)]

    def finish(self, *request_ids: str) -> None:
        """Steps until these requests have ended, whatever is kept for others.

        Raises:
            AssertionError: nothing moves.
        """
        progress = ProgressWatch()
        while any(id_ not in self.reasons for id_ in request_ids):
            self.step()
            progress.observe(self.state())
