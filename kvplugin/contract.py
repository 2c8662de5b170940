"""What a connector and an engine promise each other; knows no engine and no torch.

A connector has two halves. The **scheduler half** lives beside the engine's
scheduler, one per engine; the **worker half** lives beside each rank's KV tensors.
One request walks through them like this:

1. `SchedulerHalf.lookup` says how many tokens beyond the local hit it can bring.
2. The engine allocates blocks *without hashes* and calls `allocated`; the request
   is parked until its load is reported.
3. `plan_step` closes the scheduling step: an opaque message to all worker halves
   (loads of step 2, stores of blocks that this step completes).
4. Each worker half gets `begin_step`, the engine computes, `end_step`, `poll` (or
   `poll`, `end_step` where a drafter writes KV after the forward).
5. `poll` says which requests' loads ended, and how; its `report` goes back to
   `SchedulerHalf.apply`, which counts completions over ranks.
6. `finished` ends the request; blocks that transfers still read stay referenced
   through `EngineBlocks` until those transfers end.

Connectors between engines implement two more protocols: `MeetsPeers` beside the
scheduler half, `IntroducesItself` beside each worker half.

Messages between the halves are bytes (see `kvplugin.wire`); an empty message means
"nothing" and costs nothing.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

from kvplugin.events import KVCacheEvent
from kvplugin.layout import KVLayout, PageLayout, StatePart, TensorLayout


class GroupKind(StrEnum):
    """How the layers of a group use their history."""

    FULL = "full"
    MLA = "mla"
    SLIDING_WINDOW = "sliding_window"
    CHUNKED_LOCAL = "chunked_local"
    MAMBA = "mamba"
    CROSS_ATTENTION = "cross_attention"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """One KV cache group: layers that share a block table."""

    index: int
    kind: GroupKind
    block_size: int
    """Tokens of one block."""
    layers: Mapping[str, PageLayout]
    """The page each layer's spec promises."""
    window: int = 0
    """Tokens that a window reads, its own included, or that a chunk holds
    (`SLIDING_WINDOW`, `CHUNKED_LOCAL`)."""
    extra_history: int = 0
    """Tokens before the window that the engine keeps as well, for drafts."""
    state_every_block: bool = False
    """`MAMBA`: each block that a step fills ends with a state (vLLM's cache mode
    ``all``); else a step leaves one state, at its end (``align``)."""
    has_drafter: bool = False
    """Layers of a drafter are in it. What they hold for the last token of a block
    depends on the token behind it, so the last block of a hit says nothing of its
    successor: it must be followed by one more that fits."""
    reusable: bool = True
    """Whether its blocks can be found again by their hashes. Those of a group that is
    not need not be there for a hit (scratch memory, rings)."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over the group's layers, on one rank."""
        return sum(page.page_bytes for page in self.layers.values())


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """What the numbers in a KV cache depend on, beside tokens and layout."""

    name: str = ""
    revision: str = ""
    dtype: str = ""
    """Of the computation, such as bfloat16."""
    quantization: str = ""
    backends: tuple[str, ...] = ()
    """Attention backends: they decide what is inside a page."""
    hash_algorithm: str = ""
    """Of the block hashes."""
    weight_epoch: int = 0
    """Raised whenever the weights change."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a connector needs to know of its engine, translated once at the start."""

    engine_id: str
    groups: tuple[GroupInfo, ...]
    num_blocks: int
    """Blocks of the engine's pool, the null block included."""
    hash_block_size: int
    """Tokens that one entry of `RequestView.block_hashes` covers."""
    world_size: int = 1
    """Ranks that hold KV: each has a worker half, completion is a count over them."""
    rank: int = 0
    """Pipeline rank times `tp_size`, plus tensor-parallel rank."""
    tp_size: int = 1
    """Ranks that share the heads of a layer; world_size / tp_size pipeline stages."""
    max_model_len: int = 0
    """Tokens of the longest request; 0 for as many as the pool holds."""
    max_step_tokens: int = 0
    """Tokens that a step computes at most; 0 for as many as a request has."""
    model: ModelIdentity = ModelIdentity()
    """Whose KV it is."""
    reports_failed_loads: bool = True
    """Whether the engine can be told that a load failed. Where it cannot (vLLM 0.19
    beside its own scheduler, but for one group of full attention), nothing may be
    offered that might not arrive."""
    prefix_caching: bool = True
    """Whether a block loaded for one request can be hit by the next one."""
    asks_pending_work: bool = True
    """Whether the engine keeps stepping while `has_pending_work()` is true."""


class RequestView(Protocol):
    """The attributes of an engine's request that connectors read."""

    @property
    def request_id(self) -> str: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def block_hashes(self) -> Sequence[bytes]: ...


class PeerRequestView(RequestView, Protocol):
    """What connectors between engines read beside that."""

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None:
        """What the client sent for connectors, in vLLM's terms; not validated."""

    @property
    def all_token_ids(self) -> Sequence[int]: ...
    @property
    def lora_request(self) -> Any: ...
    @property
    def cache_salt(self) -> str | None: ...
    @property
    def mm_features(self) -> Sequence[Any]: ...
    @property
    def prompt_embeds(self) -> Any: ...


class EngineBlocks(Protocol):
    """References to blocks of the engine's own pool."""

    def acquire(self, ids: Sequence[int]) -> None:
        """Keep the content of these blocks (in use now) until `release`."""

    def release(self, ids: Sequence[int]) -> None:
        """Undo one `acquire`; order: what may be evicted first, first."""

    def forget(self, ids: Sequence[int]) -> None:
        """Nobody is to find these blocks by their hashes (any more), whoever has them:
        they hold less than those promise."""


class Lookup(NamedTuple):
    """Answer to "how many tokens beyond the local hit?"."""

    tokens: int
    ready: bool = True
    """False: ask again at the next step; `tokens` means nothing."""


MISS: Final = Lookup(0)
LATER: Final = Lookup(0, ready=False)


class StateBlock(NamedTuple):
    """A recurrent state that outlives its step."""

    group: int
    num_tokens: int
    """After which it is the state, a multiple of the group's block size."""
    block: int


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """Progress of one request in one step.

    A row only grows: entries that the engine has since given back or moved are not
    named again. So of a window group only what the step writes is there for certain,
    of a state group only the state at the step's end, and what `states` names.
    """

    request_id: str
    new_block_ids: tuple[Sequence[int], ...]
    """Per group: blocks appended to the row since `SchedulerHalf.allocated` or the
    last step; empty for a request whose blocks `allocated` named in this step."""
    num_computed_tokens: int
    """Tokens whose KV exists before the step."""
    num_scheduled_tokens: int
    states: Sequence[StateBlock] = ()
    """States that the step leaves beside those at its end."""

    @property
    def num_tokens_after(self) -> int:
        """Tokens whose KV exists after the step, drafts included."""
        return self.num_computed_tokens + self.num_scheduled_tokens


@dataclass(frozen=True, slots=True)
class Step:
    """What a scheduling step decided, as far as `SchedulerHalf.watched` asks."""

    scheduled: Sequence[ScheduledRequest] = ()
    preempted: Collection[str] = ()
    num_tokens: int = 0
    """Tokens that the whole step computes."""


EMPTY_STEP: Final = Step()


@dataclass(frozen=True, slots=True)
class Stats:
    """Changes since the last snapshot, by metric name without prefix."""

    counters: dict[str, float] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)
    observations: dict[str, list[float]] = field(default_factory=dict)
    """Of histograms, in order."""

    def __bool__(self) -> bool:
        return bool(self.counters or self.gauges or self.observations)


class SchedulerHalf(Protocol):
    """The half beside the engine's scheduler; called from its thread only."""

    @property
    def watched(self) -> Collection[str]:
        """Ids of running requests whose progress `plan_step` wants to hear."""

    def bind_blocks(self, blocks: EngineBlocks) -> None:
        """Called once, before the first step."""

    def lookup(self, request: RequestView, num_local_tokens: int) -> Lookup:
        """Tokens it can bring beyond the block-aligned local hit, at most those that
        the request has; the engine takes any other answer, or an error, for a miss.
        Changes nothing that a second call would notice, and never answers `LATER` for
        ever. Not asked while an earlier load of the request is under way, for which it
        does not wait any more."""

    def allocated(
        self,
        request: RequestView,
        block_ids: tuple[Sequence[int], ...],
        num_external_tokens: int,
    ) -> None:
        """Blocks are there; said again, with no external tokens, when a request goes on
        after its load. `block_ids` is the whole row a group, local hits
        included; the last `num_external_tokens` of it are to be loaded. Entry i of a
        row is about tokens from i times the group's block size on; 0, the null block,
        stands where the group needs nothing (before a window, between states).

        Of a whole prompt one token less counts as computed than is loaded: its last
        token is computed in any case. A recurrent state must then be the one after
        `num_tokens - 1` tokens, so who has none must not offer the last token."""

    def plan_step(self, step: Step) -> bytes:
        """The message to the worker halves; empty for nothing."""

    def apply(self, reports: Iterable[bytes]) -> None:
        """Reports of worker halves, in any order; late and repeated ones too."""

    def distrust(self, block_ids: AbstractSet[int]) -> None:
        """Blocks of the engine hold no valid bytes after all (somebody's load failed);
        said before `apply` of the same step. Nor does what was computed on top of them,
        in this step or one that is under way: blocks of any request whose row has one
        of these. Some engines name those too, some only what was not loaded."""

    def finished(self, request: RequestView) -> bool:
        """The request ended (aborted or not). True: its end is to be announced by
        `WorkerOutcome.finished_sends`, on every rank, before the engine may forget
        it."""

    def reset(self) -> bool:
        """Forget all that is stored. False: something loaded from it may yet appear
        in the engine; call again. Called whenever the engine's own cache is reset,
        also if that one has to wait."""

    def has_pending_work(self) -> bool:
        """Transfers are under way that need further steps to be noticed."""

    def has_pending_frees(self) -> bool:
        """Transfers under way hold engine blocks that will be free soon."""

    def take_events(self) -> list[KVCacheEvent]: ...
    def take_stats(self) -> Stats | None: ...
    def check(self) -> None: ...
    def close(self) -> None: ...


@runtime_checkable
class MeetsPeers(Protocol):
    """What a scheduler half has beside `SchedulerHalf` if it exchanges KV with other
    engines."""

    def meet(self, introductions: Mapping[int, bytes]) -> None:
        """What each rank's `IntroducesItself.introduction` said, by rank; once, before
        the first request."""

    def arrived(self, request: PeerRequestView) -> int:
        """A request has come; said once, before its first `lookup`. Tokens at the end
        of its prompt that this engine is to leave away: the next engine computes
        them itself, on states that end before them."""

    def handover(
        self,
        request: PeerRequestView,
        block_ids: tuple[Sequence[int], ...],
        num_computed_tokens: int,
    ) -> Mapping[str, Any] | None:
        """The request has ended as it should (not aborted, not failed) and still has
        its blocks: what its client is told (``kv_transfer_params``), None for nothing.
        Said right before `finished`.

        Args:
            request: it.
            block_ids: its row a group, as in `SchedulerHalf.allocated`.
            num_computed_tokens: whose KV the row holds.
        """


@dataclass(frozen=True, slots=True)
class WorkerOutcome:
    """What one rank has to say after a step."""

    finished_loads: frozenset[str] = frozenset()
    """Requests whose load has ended on this rank, failed ones included. Each load is
    reported once: the worker half knows its jobs, while to the engine a request's id
    names whichever load of it is under way, so that a report of an earlier one would
    end a later one."""
    failed_loads: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Requests with blocks that hold no valid bytes, and these blocks; with the load's
    end or before it. All that the load was to fill counts as failed if no block is
    named, or one that it was not to fill."""
    finished_sends: frozenset[str] = frozenset()
    """Requests whose end this rank announces (`SchedulerHalf.finished`): when all ranks
    have, the engine forgets the request, and its id may be used again."""
    report: bytes = b""
    """For `SchedulerHalf.apply`."""


NOTHING_HAPPENED: Final = WorkerOutcome()


@dataclass(frozen=True, slots=True)
class KVTensor:
    """One layer's KV memory on this rank."""

    address: int
    """Of the view's first element. The engine keeps the memory alive."""
    layout: TensorLayout
    device: str = "cpu"
    """As torch names it, e.g. ``cuda:0``; only the CPU's memory has addresses that the
    host may use."""
    rows: KVLayout | None = None
    """Where each row lies, from `address` on, where the interior of a page is known."""
    interior: str = ""
    """Names the interior of a page for comparison: backend, instruction set, dtype.
    Pages of equal interiors may be moved as bytes, whatever is inside."""
    total_heads: int = 0
    """KV heads of the layer over all tensor-parallel ranks; 0 where every rank holds
    the same rows (a latent)."""
    state: tuple[StatePart, ...] = ()
    """How ranks share the rows of a recurrent state whose page is one run of bytes;
    `interior` says nothing of rows and ranks then. Empty where that is not known: pages
    can only be moved as they are, between as many ranks."""


class WorkerHalf(Protocol):
    """The half beside one rank's KV tensors; called from the worker's thread."""

    def register(self, tensors: Mapping[str, KVTensor]) -> None:
        """KV memory by layer name, once, before the first step."""

    def begin_step(self, plan: bytes) -> None:
        """Start the loads of the plan. What the engine does to new blocks, such as
        zeroing, it has done: these may be filled from now on."""

    def end_step(self) -> None:
        """The step's KV is written: start the stores of the plan."""

    def poll(self) -> WorkerOutcome:
        """What ended since the last call; waits a short, bounded time at most."""

    def drain(self) -> bytes:
        """Wait until every store has ended; a report for `SchedulerHalf.apply`."""

    def close(self) -> None: ...


@runtime_checkable
class IntroducesItself(Protocol):
    """What a worker half has beside `WorkerHalf` if other engines read its memory."""

    def introduction(self) -> bytes:
        """What they must know of this rank, for `MeetsPeers.meet`; asked once, after
        `register`."""


class CopyJob(NamedTuple):
    """Blocks to copy between the engine's KV tensors and a tier."""

    id: int
    store: bool
    """True: engine to tier. False: tier to engine."""
    parts: Sequence[tuple[int, Sequence[int], Sequence[int]]]
    """(group, engine block ids, tier block ids), ids pairwise."""


class CopyResult(NamedTuple):
    """How a job ended. Nothing of a failed job may be used."""

    id: int
    error: str = ""
    """Empty: every byte is where it should be."""
    nbytes: int = 0
    seconds: float = 0.0


class Transport(Protocol):
    """Executes copy jobs, each exactly once, in any order of completion."""

    def submit(self, job: CopyJob) -> None:
        """Queue a job; never blocks and never raises for a job's own failure."""

    def poll(self, wait: float) -> list[CopyResult]:
        """Results since the last call; waits at most `wait` seconds for all jobs
        under way, and not at all when none is."""

    def close(self) -> None:
        """Stop after the jobs under way; further `submit` is an error."""
