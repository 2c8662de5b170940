"""An engine to test plugins in: a scheduler, a toy model, a clock, and all oracles.

    lab = Lab([spec], 12, connector=MyHalf(), make_worker=MyWorkerHalf,
              fate_of=lambda job: LATE)
    lab.add(range(20), 3)                        # a prompt, and tokens to generate
    lab.run()                                    # until nothing is left to do
    lab.drain()                                  # the same, and the judgement

What breaks raises where it happens: wrong bytes when they are read, a broken invariant
after the step that broke it, a policy's fault in the call, a hang when a state repeats.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from kvplugin.contract import CopyJob, SchedulerHalf, Transport, WorkerHalf
from kvplugin.hashing import HashFormat, get_hash_format
from kvplugin.hooks import Hooks
from kvplugin.manager import KVCacheManager
from kvplugin.request import Request
from kvplugin.scheduler.config import SchedulerConfig
from kvplugin.scheduler.output import RequestOutput
from kvplugin.scheduler.scheduler import Scheduler
from kvplugin.spec import EngineLimits, KVCacheConfig, KVCacheGroupSpec, KVCacheSpec
from kvplugin.testing.content import ContentModel
from kvplugin.testing.faults import COMPLETES, ContentTier, Fate, FaultyTransport
from kvplugin.testing.oracles import (
    assert_balanced,
    assert_cache_content,
    assert_equivalent,
    assert_poisoned,
)
from kvplugin.testing.policy_watch import watch_policy
from kvplugin.testing.pool_watch import watched_content
from kvplugin.testing.progress import ProgressWatch
from kvplugin.testing.references import CountedHalf, counted
from kvplugin.testing.rules import Identity, identity_of_request
from kvplugin.testing.toy_model import ToyModel
from kvplugin.testing.transport import FakeTransport

MAX_LEN: Final = 128
BUDGET: Final = 16
"""Tokens of a step, so that prompts take some."""


class Lab:
    """One engine. Everything in it may be looked at and replaced.

    Args:
        specs: one a group of layers.
        usable: blocks of the pool beside the null block. Fewer than the requests need
            at one time make for preemptions and evictions.
        connector: a new scheduler half.
        make_worker: makes the worker half over a transport, which moves blocks between
            the engine and a tier of as many as anybody likes.
        fate_of: what becomes of a job of that transport.
        synchronous: external tokens count as computed at admission.
        depth: steps in flight, 1 or 2.
        drafts: tokens that the model proposes after each sample.
        lookahead: slots that it writes behind the settled tokens.
        caching: whether blocks can be hit.
        rereads: whether the draft model must see the last cached tokens again.
        ranks: worker halves that `make_workers` makes.
        hooks: the plugins to ask; those that are installed if None.
        max_model_len: tokens of a request at most.
        hash_format: of block hashes; the default one if None.
        settings: further ones of `SchedulerConfig`.
    """

    def __init__(
        self,
        specs: Sequence[KVCacheSpec],
        usable: int,
        *,
        connector: SchedulerHalf | None = None,
        make_worker: Callable[[Transport], WorkerHalf] | None = None,
        fate_of: Callable[[CopyJob], Fate] = lambda job: COMPLETES,
        synchronous: bool = False,
        depth: int = 1,
        drafts: int = 0,
        lookahead: int = 0,
        caching: bool = True,
        rereads: bool = False,
        ranks: int = 1,
        hooks: Hooks | None = None,
        max_model_len: int = MAX_LEN,
        hash_format: HashFormat | None = None,
        **settings: Any,
    ) -> None:
        chosen = SchedulerConfig(
            **{"max_num_batched_tokens": BUDGET}
            | {"pipeline_depth": depth, "num_lookahead_tokens": lookahead}
            | settings
        )
        groups = [KVCacheGroupSpec((f"l{i}",), spec) for i, spec in enumerate(specs)]
        config = KVCacheConfig(1 + usable, (), tuple(groups))
        self.hash_format = hash_format or get_hash_format()
        self.hash_size = min(spec.block_size for spec in specs)
        self.kv = KVCacheManager(
            config,
            max_model_len,
            self.hash_size,
            enable_caching=caching,
            use_eagle=rereads,
            limits=EngineLimits(
                max_model_len=max_model_len,
                max_num_batched_tokens=chosen.max_num_batched_tokens,
                max_concurrent_batches=depth,
                num_lookahead_tokens=lookahead,
            ),
            hash_format=self.hash_format,
            hooks=hooks,
        )
        watch_policy(self.kv.block_pool)
        self.memory = self.make_memory(config)
        self.now = 0.0
        """The scheduler's clock, in seconds; stands still unless a test moves it."""
        self.connector = connector or self.make_connector()
        self.transport = self.make_transport(fate_of)
        half = self.connector
        self._counted: CountedHalf | None = None if half is None else counted(half)
        self.scheduler = Scheduler(
            self.kv,
            chosen,
            connector=self._counted,
            num_ranks=ranks,
            loads_synchronously=synchronous,
            clock=lambda: self.now,
            hooks=hooks,
        )
        self.requests: dict[str, Request] = {}
        """All there ever were."""
        self.outputs: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        """Why those ended that did."""
        self.handed_over: dict[str, Mapping[str, Any]] = {}
        """What the connector says to whoever goes on with a request that has ended."""
        self._spans: dict[str, list[tuple[int, Identity]]] = {}
        self.model = ToyModel(
            self.memory,
            depth=depth,
            num_drafts=drafts,
            num_lookahead_tokens=lookahead,
            max_model_len=max_model_len,
            identity_of=lambda id_: identity_of_request(self.requests[id_]),
            workers=self.make_workers(make_worker),
        )

    # -- what a subclass may make --------------------------------------------------

    def make_memory(self, config: KVCacheConfig) -> ContentModel:
        """What is in the blocks of `kv.block_pool`; watches it."""
        return watched_content(config, self.kv.block_pool)

    def make_connector(self) -> SchedulerHalf | None:
        """The scheduler half, where the constructor was not given one."""
        return None

    def make_transport(self, fate_of: Callable[[CopyJob], Fate]) -> FakeTransport:
        """What moves blocks."""
        return FaultyTransport(ContentTier(self.memory).execute, fate_of)

    def make_workers(
        self, make_worker: Callable[[Transport], WorkerHalf] | None
    ) -> list[WorkerHalf]:
        """The worker half, if there is one; one a rank."""
        return [] if make_worker is None else [make_worker(self.transport)]

    # -- what may happen -----------------------------------------------------------

    def add(
        self,
        prompt: Sequence[int],
        n: int,
        *,
        stop_token_ids: Sequence[int] = (),
        **attributes: Any,
    ) -> str:
        """A request arrives; its id. One that is refused leaves nothing behind.

        Args:
            prompt: its tokens.
            n: tokens to generate at most.
            stop_token_ids: tokens that end it.
            attributes: further ones of `Request`, e.g. `priority` or `cache_salt`.
        """
        id_ = f"r{len(self.requests)}"
        request = Request(
            id_,
            prompt,
            hash_format=self.hash_format,
            hash_block_size=self.hash_size,
            **attributes,
        )
        self.scheduler.add_request(request, n, stop_token_ids=stop_token_ids)
        self.requests[id_], self.outputs[id_] = request, []
        return id_

    def step(self) -> None:
        """Schedule one step, and execute what must be executed before the next."""
        if self.scheduler.requests or not len(self.model):
            self.model.submit(self.scheduler.schedule())
        self.check()
        if self.model.is_full or not self.scheduler.requests:
            self.land()

    def land(self) -> None:
        """Execute the oldest step in flight; the scheduler hears what came of it."""
        for news in self.scheduler.update_from_output(self.model.execute()):
            self._hear(news)
        self.check()

    def run(self) -> None:
        """Steps until nothing is left to do: no request, transfer, or step in flight.

        Raises:
            AssertionError: something is left, and nothing moves.
        """
        progress = ProgressWatch()
        while self.scheduler.has_work():
            self.step()
            if self.scheduler.has_work():
                progress.observe(self.state())

    def drain(self) -> None:
        """Let everything end, and judge it by all oracles that apply."""
        self.transport.release()
        self.run()
        assert_equivalent(self.outputs, self.expected())
        assert_cache_content(self.memory, self.kv, self.requests.values())
        assert_balanced(
            self.kv,
            requests=self.scheduler.requests,
            worker=self.model.tracked,
            steps=self.model,
            references=self._taken,
        )

    # -- what must hold ------------------------------------------------------------

    def check(self) -> None:
        """What must hold at any time.

        Raises:
            AssertionError: naming what is wrong, `ContentError` if bytes are.
            IntegrityError: a check of the scheduler's or the connector's.
        """
        self.scheduler.check(self._taken)
        if self.connector is not None:
            self.connector.check()
        assert_poisoned(self.memory, self.kv.block_pool)

    def state(self) -> dict[str, Any]:
        """What the future depends on (see `ProgressWatch`). To be extended by whoever
        waits for something else, e.g. a worker half that counts its polls."""
        return {
            **self.scheduler.state(),
            "in_flight": [
                (dict(step.num_scheduled_tokens), step.connector_plan)
                for step in self.model.in_flight
            ],
            "connector references": sorted(self._taken),
            "transport": self.transport.state(),
            "now": self.now,
        }

    def expected(self) -> dict[str, list[int]]:
        """The outputs of a run with everything off."""
        return {id_: self._expected(id_) for id_ in self.requests}

    def _expected(self, id_: str) -> list[int]:
        request, output = self.requests[id_], self.outputs[id_]
        prompt = request.all_token_ids[: request.num_prompt_tokens]
        tokens: list[int] = []
        for start, stop, identity in self._spans_of(id_):
            before = [*prompt, *output[:start]]
            tokens += self.model.reference(before, stop - start, identity)
        return tokens

    # -- inside --------------------------------------------------------------------

    @property
    def _taken(self) -> list[int]:
        """Blocks that the connector references."""
        return [] if self._counted is None else self._counted.taken

    def _hear(self, news: RequestOutput) -> None:
        output = self.outputs[news.req_id]
        identity = identity_of_request(self.requests[news.req_id])
        spans = self._spans.setdefault(news.req_id, [])
        if news.new_token_ids and (not spans or spans[-1][1] != identity):
            spans.append((len(output), identity))
        output += news.new_token_ids
        if news.finish_reason is not None:
            self.reasons[news.req_id] = news.finish_reason
        if news.kv_transfer_params is not None:
            self.handed_over[news.req_id] = news.kv_transfer_params

    def _spans_of(self, id_: str) -> Iterator[tuple[int, int, Identity]]:
        """Runs of output tokens that were computed with the same weights."""
        starts = [*self._spans.get(id_, ()), (len(self.outputs[id_]), Identity())]
        for (start, identity), (stop, _) in pairwise(starts):
            yield start, stop, identity
