"""A connector for tests of a scheduler: somebody remote has any prefix it claims.

Both halves of `kvplugin.contract`, on content models. What `offers` says of a request
is there, with the right bytes, once the transport's job completes; the test decides
when, and whether it does:

    remote = RemoteKV()
    transport = FakeTransport(remote.execute(memory), held=True)
    worker = RemoteWorker(remote, memory, transport)
    scheduler = Scheduler(manager, config, connector=remote)
    model = ToyModel(memory, workers=[worker])
    remote.offers["r0"] = 32                     # tokens of its prefix
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from kvplugin.block import NULL_BLOCK
from kvplugin.contract import (
    LATER,
    MISS,
    NOTHING_HAPPENED,
    CopyJob,
    EngineBlocks,
    KVTensor,
    Lookup,
    Stats,
    Step,
    WorkerOutcome,
)
from kvplugin.events import KVCacheEvent
from kvplugin.spec import cdiv
from kvplugin.testing.content import ContentModel
from kvplugin.testing.rules import GroupModel, identity_of_request
from kvplugin.testing.slots import STATE_SLOT, BlockContent, Content, Slot, Void
from kvplugin.testing.transport import FakeTransport


@dataclass(frozen=True, slots=True)
class RemoteLoad:
    """One load, from the moment the engine allocated its blocks."""

    id: int
    """Of the job, on every rank."""
    request_id: str
    rows: tuple[list[int], ...]
    start: int
    """Tokens that the engine had itself."""
    stop: int
    histories: Sequence[int]

    def parts(
        self, groups: Sequence[GroupModel]
    ) -> list[tuple[int, list[int], list[int]]]:
        """Blocks to fill, as in `CopyJob.parts`; a tier id is an entry of the row.

        Not those behind `stop`, which the engine computes itself.
        """
        parts = []
        for group, row in zip(groups, self.rows, strict=True):
            size = group.block_size
            entries = range(self.start // size, min(cdiv(self.stop, size), len(row)))
            taken = [i for i in entries if row[i] != NULL_BLOCK]
            if taken:
                parts.append((group.index, [row[i] for i in taken], taken))
        return parts

    def content(self, group: GroupModel, entry: int) -> BlockContent:
        """The bytes of one block of the row."""
        first = entry * group.block_size
        end = min(first + group.block_size, self.stop)
        positions = range(first, end) if group.keeps_tokens else range(end - 1, end)
        slots: dict[int, Content] = {
            position - first if group.keeps_tokens else STATE_SLOT: Slot(
                group.index, position, self.histories[position], "remote"
            )
            for position in positions
        }
        return BlockContent(Void.UNWRITTEN, slots)


class RemoteKV:
    """The scheduler half."""

    watched: Collection[str] = ()

    def __init__(self) -> None:
        self.offers: dict[str, int] = {}
        """Tokens of a request's prefix that the remote has."""
        self.undecided: set[str] = set()
        """Requests whose lookup answers `LATER`."""
        self.sends: set[str] = set()
        """Requests whose end `RemoteWorker.sent` announces."""
        self.loads: dict[int, RemoteLoad] = {}
        """Every load there ever was, by job."""
        self.distrusted: list[set[int]] = []
        """What `distrust` was told."""
        self.blocks: EngineBlocks | None = None
        # Of each request the tokens before those that the last lookup offered.
        self._local: dict[str, int] = {}
        self._new: list[int] = []

    def execute(self, memory: ContentModel) -> Callable[[CopyJob], int]:
        """What a `FakeTransport` of one rank does with a job."""

        def move(job: CopyJob) -> int:
            load = self.loads[job.id]
            for group, blocks, entries in job.parts:
                model = memory.groups[group]
                payload = [load.content(model, entry) for entry in entries]
                memory.load(payload, blocks)
            return sum(len(blocks) for _, blocks, _ in job.parts)

        return move

    # -- the contract --------------------------------------------------------------

    def bind_blocks(self, blocks: EngineBlocks) -> None:
        """See `SchedulerHalf`, as all that follows."""
        self.blocks = blocks

    def lookup(self, request: Any, num_local_tokens: int) -> Lookup:
        if request.request_id in self.undecided:
            return LATER
        self._local[request.request_id] = num_local_tokens
        more = self.offers.get(request.request_id, 0) - num_local_tokens
        return Lookup(more) if more > 0 else MISS

    def allocated(
        self,
        request: Any,
        block_ids: tuple[Sequence[int], ...],
        num_external_tokens: int,
    ) -> None:
        if not num_external_tokens:
            return
        stop = request.num_computed_tokens
        # Of a whole prompt the last token is not credited: `stop` says what is.
        start = self._local[request.request_id]
        histories = identity_of_request(request).histories(request.all_token_ids)
        load = RemoteLoad(
            len(self.loads) + 1,
            request.request_id,
            tuple(map(list, block_ids)),
            start,
            stop,
            histories,
        )
        self.loads[load.id] = load
        self._new.append(load.id)

    def plan_step(self, step: Step) -> bytes:
        del step
        new, self._new = self._new, []
        return json.dumps(new).encode() if new else b""

    def apply(self, reports: Iterable[bytes]) -> None:
        del reports

    def distrust(self, block_ids: AbstractSet[int]) -> None:
        self.distrusted.append(set(block_ids))

    def finished(self, request: Any) -> bool:
        return request.request_id in self.sends

    def reset(self) -> bool:
        self.offers.clear()
        return True

    def has_pending_work(self) -> bool:
        return bool(self._new)

    def has_pending_frees(self) -> bool:
        return False

    def take_events(self) -> list[KVCacheEvent]:
        return []

    def take_stats(self) -> Stats | None:
        return None

    def check(self) -> None: ...

    def close(self) -> None: ...


class RemoteWorker:
    """The worker half of one rank.

    Args:
        remote: the scheduler half.
        memory: the rank's blocks.
        transport: its `execute` is `remote.execute(memory)`.
        synchronous: loads are there when the step computes, but for those in `fails`.
        on_invalid: told the blocks of a synchronous load that failed, e.g.
            ``model.invalid_block_ids.update``.
    """

    def __init__(
        self,
        remote: RemoteKV,
        memory: ContentModel,
        transport: FakeTransport,
        *,
        synchronous: bool = False,
        on_invalid: Callable[[list[int]], object] = lambda blocks: None,
    ) -> None:
        self.fails: set[str] = set()
        """Requests whose synchronous loads fail."""
        self.failed_blocks: dict[str, list[int]] = {}
        """What a failed load reports; without an entry all its blocks."""
        self.sent: set[str] = set()
        """Requests to announce as sent at the next `poll`."""
        self._remote = remote
        self._memory = memory
        self._transport = transport
        self._synchronous = synchronous
        self._on_invalid = on_invalid

    def register(self, tensors: Mapping[str, KVTensor]) -> None:
        """See `WorkerHalf`, as all that follows."""
        del tensors

    def begin_step(self, plan: bytes) -> None:
        for job_id in json.loads(plan) if plan else ():
            load = self._remote.loads[job_id]
            job = CopyJob(job_id, False, load.parts(self._memory.groups))
            if not self._synchronous:
                self._transport.submit(job)
            elif load.request_id in self.fails:
                blocks = self._blocks_of(load)
                self._memory.invalidate(blocks)
                self._on_invalid(blocks)
            else:
                self._transport.execute(job)

    def end_step(self) -> None: ...

    def poll(self) -> WorkerOutcome:
        ended: set[str] = set()
        failed: dict[str, Sequence[int]] = {}
        for result in self._transport.poll(0.0):
            load = self._remote.loads[result.id]
            ended.add(load.request_id)
            if result.error:
                failed[load.request_id] = self._blocks_of(load)
        sent, self.sent = self.sent, set()
        if not ended and not sent:
            return NOTHING_HAPPENED
        return WorkerOutcome(frozenset(ended), failed, frozenset(sent))

    def _blocks_of(self, load: RemoteLoad) -> list[int]:
        """Blocks that a failure of the load leaves without valid bytes."""
        if load.request_id in self.failed_blocks:
            return self.failed_blocks[load.request_id]
        groups = self._memory.groups
        return [block for _, blocks, _ in load.parts(groups) for block in blocks]

    def drain(self) -> bytes:
        return b""

    def close(self) -> None: ...
