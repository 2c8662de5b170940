"""A scheduler with everything that the laboratory has around it."""

from collections.abc import Sequence
from typing import Any

from kvplugin.hooks import Hooks
from kvplugin.manager import KVCacheManager
from kvplugin.request import Request
from kvplugin.scheduler.config import SchedulerConfig
from kvplugin.scheduler.scheduler import Scheduler
from kvplugin.spec import EngineLimits, KVCacheSpec
from kvplugin.testing import (
    FakeTransport,
    ProgressWatch,
    RemoteKV,
    RemoteWorker,
    ToyModel,
    assert_balanced,
    assert_cache_content,
    assert_equivalent,
    assert_poisoned,
    identity_of_request,
    watched_content,
)
from tests.core.manager_setups import FORMAT
from tests.testing.driver import MAX_LEN, config_of

BUDGET = 16


class Lab:
    """Two halves of a connector, an engine that computes with toys, and a clock.

    Args:
        specs: one a group.
        usable: blocks of the pool.
        depth: steps in flight.
        held: whether loads end only when a test says so.
        synchronous: external tokens count as computed at admission.
        drafts: tokens that the model proposes after each sample.
        lookahead: slots that it writes behind the settled tokens.
        caching: whether blocks can be hit.
        hooks: the plugins that the scheduler asks; the manager's if None.
        settings: further ones of `SchedulerConfig`.
    """

    def __init__(
        self,
        specs: Sequence[KVCacheSpec],
        usable: int,
        *,
        depth: int = 1,
        held: bool = True,
        synchronous: bool = False,
        drafts: int = 0,
        lookahead: int = 0,
        caching: bool = True,
        hooks: Hooks | None = None,
        **settings: Any,
    ) -> None:
        config = config_of(specs, 1 + usable)
        self.hash_size = min(spec.block_size for spec in specs)
        chosen = SchedulerConfig(
            **{"max_num_batched_tokens": BUDGET}
            | {"pipeline_depth": depth, "num_lookahead_tokens": lookahead}
            | settings
        )
        limits = EngineLimits(
            max_model_len=MAX_LEN,
            max_num_batched_tokens=chosen.max_num_batched_tokens,
            max_concurrent_batches=depth,
            num_lookahead_tokens=lookahead,
        )
        self.kv = KVCacheManager(
            config,
            MAX_LEN,
            self.hash_size,
            enable_caching=caching,
            limits=limits,
            hash_format=FORMAT,
        )
        self.memory = watched_content(config, self.kv.block_pool)
        self.now = 0.0
        self.remote = self.make_remote()
        self.transport = FakeTransport(self.remote.execute(self.memory), held=held)
        self.worker = RemoteWorker(
            self.remote,
            self.memory,
            self.transport,
            synchronous=synchronous,
            on_invalid=lambda blocks: self.model.invalid_block_ids.update(blocks),
        )
        self.scheduler = Scheduler(
            self.kv,
            chosen,
            connector=self.remote,
            loads_synchronously=synchronous,
            clock=lambda: self.now,
            hooks=hooks,
        )
        self.requests: dict[str, Request] = {}
        self.model = ToyModel(
            self.memory,
            depth=depth,
            num_drafts=drafts,
            num_lookahead_tokens=lookahead,
            max_model_len=MAX_LEN,
            identity_of=lambda id_: identity_of_request(self.requests[id_]),
            tokens_of=lambda id_: self.requests[id_].all_token_ids,
            workers=[self.worker],
        )
        self.outputs: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}

    def make_remote(self) -> RemoteKV:
        """The scheduler half."""
        return RemoteKV()

    def add(
        self,
        prompt: Sequence[int],
        n: int,
        *,
        remote_tokens: int = 0,
        priority: int = 0,
    ) -> str:
        """A request arrives; its id. One that is refused leaves nothing behind."""
        id_ = f"r{len(self.requests)}"
        request = Request(
            id_,
            prompt,
            hash_format=FORMAT,
            hash_block_size=self.hash_size,
            priority=priority,
        )
        self.scheduler.add_request(request, n)
        self.requests[id_], self.outputs[id_] = request, []
        self.remote.offers[id_] = remote_tokens
        return id_

    def step(self) -> None:
        """Schedule one step, and execute what must be executed before the next."""
        if self.scheduler.requests or not len(self.model):
            self.model.submit(self.scheduler.schedule())
        self.check()
        if self.model.is_full or not self.scheduler.requests:
            self.land()

    def land(self) -> None:
        for news in self.scheduler.update_from_output(self.model.execute()):
            self.outputs[news.req_id] += news.new_token_ids
            if news.finish_reason is not None:
                self.reasons[news.req_id] = news.finish_reason
        self.check()

    def check(self) -> None:
        self.scheduler.check()
        assert_poisoned(self.memory, self.kv.block_pool)

    def drain(self) -> None:
        """Let everything end, and judge it."""
        self.transport.held = False
        progress = ProgressWatch()
        while self.scheduler.has_work():
            self.step()
            if self.scheduler.requests:
                progress.observe(self.scheduler.state())
        while len(self.model):
            self.land()
        expected = {
            id_: self.model.reference(
                request.all_token_ids[: request.num_prompt_tokens],
                len(self.outputs[id_]),
            )
            for id_, request in self.requests.items()
        }
        assert_equivalent(self.outputs, expected)
        assert_cache_content(self.memory, self.kv, self.requests.values())
        assert_balanced(
            self.kv, requests=self.scheduler.requests, worker=self.model.tracked
        )
