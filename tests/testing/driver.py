"""The least that can drive a toy model: a step loop without queues worth the name."""

from collections.abc import Sequence

from kvplugin.manager import KVCacheManager
from kvplugin.request import Request
from kvplugin.scheduler.output import (
    BlockIds,
    CachedRequestData,
    NewRequestData,
    SchedulerOutput,
)
from kvplugin.spec import EngineLimits, KVCacheConfig, KVCacheGroupSpec, KVCacheSpec
from kvplugin.testing.pool_watch import watched_content
from kvplugin.testing.progress import ProgressWatch
from kvplugin.testing.rules import identity_of_request
from kvplugin.testing.toy_model import ToyModel
from tests.core.manager_setups import FORMAT

MAX_LEN = 128


def config_of(specs: Sequence[KVCacheSpec], num_blocks: int) -> KVCacheConfig:
    groups = [KVCacheGroupSpec((f"l{i}",), spec) for i, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks, (), tuple(groups))


class Driver:
    """Runs requests in order of arrival; who finds no blocks preempts the last one."""

    def __init__(
        self,
        specs: Sequence[KVCacheSpec],
        num_blocks: int,
        *,
        budget: int = 16,
        unit: int = 1,
        drafts: int = 0,
        lookahead: int = 0,
        caching: bool = True,
        strict: bool = True,
    ) -> None:
        config = config_of(specs, num_blocks)
        self.hash_size = min(spec.block_size for spec in specs)
        self.budget, self.unit, self.lookahead = budget, unit, lookahead
        self.kv = KVCacheManager(
            config,
            MAX_LEN,
            self.hash_size,
            enable_caching=caching,
            use_eagle=lookahead > 0,
            enable_kv_cache_events=True,
            limits=EngineLimits(max_model_len=MAX_LEN, max_num_batched_tokens=budget),
            hash_format=FORMAT,
        )
        self.memory = watched_content(config, self.kv.block_pool, strict=strict)
        self.requests: dict[str, Request] = {}
        self.model = ToyModel(
            self.memory,
            num_drafts=drafts,
            num_lookahead_tokens=lookahead,
            max_model_len=MAX_LEN,
            identity_of=lambda id_: identity_of_request(self.requests[id_]),
            tokens_of=lambda id_: self.requests[id_].all_token_ids,
        )
        self.waiting: list[str] = []
        self.running: list[str] = []
        self.left: dict[str, int] = {}
        self.drafts: dict[str, list[int]] = {}
        self.outputs: dict[str, list[int]] = {}
        self.num_preemptions = self.num_accepted = 0
        self._known: set[str] = set()
        self._finished: set[str] = set()
        self._preempted: set[str] = set()
        self._step = 0

    def add(self, prompt: Sequence[int], n: int, **kwargs: object) -> Request:
        request = Request(
            f"r{len(self.requests)}",
            prompt,
            hash_format=FORMAT,
            hash_block_size=self.hash_size,
            **kwargs,  # type: ignore[arg-type]
        )
        self.requests[request.request_id] = request
        self.left[request.request_id] = n
        self.outputs[request.request_id] = []
        self.waiting.append(request.request_id)
        return request

    def run(self) -> None:
        progress = ProgressWatch()
        while self.waiting or self.running:
            self.step()
            tokens = {id_: r.num_computed_tokens for id_, r in self.requests.items()}
            progress.observe((self.waiting, self.running, tokens, self.outputs))

    def expected(self) -> dict[str, list[int]]:
        """What each request must give."""
        return {
            id_: self.model.reference(
                request.all_token_ids[: request.num_prompt_tokens],
                len(self.outputs[id_]),
                identity_of_request(request),
            )
            for id_, request in self.requests.items()
        }

    def step(self) -> None:
        self._step += 1
        self.kv.new_step_starts()
        new: list[NewRequestData] = []
        cached: list[CachedRequestData] = []
        scheduled: dict[str, int] = {}
        spec: dict[str, list[int]] = {}
        for id_ in list(self.running):
            if id_ in self.running:
                self._continue(id_, cached, scheduled, spec)
        if not self._preempted:
            self._admit(new, cached, scheduled)
        output = SchedulerOutput(
            self._step,
            new,
            [data for data in cached if data.req_id in scheduled],
            scheduled,
            spec,
            new_block_ids_to_zero=self.kv.take_new_block_ids(),
            preempted_req_ids=frozenset(self._preempted),
            finished_req_ids=frozenset(self._finished),
        )
        self._preempted, self._finished = set(), set()
        self.model.submit(output)
        self._update(output)
        self.kv.check()

    def _cut(self, request: Request, left: int, budget: int) -> int:
        """Prefills end at a multiple of the unit, as states need it."""
        n = min(left, budget)
        if self.unit == 1 or left == 1:
            return n
        end, last = request.num_computed_tokens + n, request.num_tokens
        last -= last % self.unit
        if end < last:
            return n // self.unit * self.unit
        return (
            last - request.num_computed_tokens
            if last < end and last > (request.num_computed_tokens)
            else n
        )

    def _continue(
        self,
        id_: str,
        cached: list[CachedRequestData],
        scheduled: dict[str, int],
        spec: dict[str, list[int]],
    ) -> None:
        request = self.requests[id_]
        left = request.num_tokens - request.num_computed_tokens
        n = self._cut(request, left, self.budget - sum(scheduled.values()))
        if not n:
            return
        drafts = self.drafts.pop(id_, []) if n == left else []
        drafts = drafts[: max(MAX_LEN - request.num_tokens, 0)]
        while True:
            blocks = self.kv.allocate_slots(
                request, n + len(drafts), num_lookahead_tokens=self.lookahead
            )
            if blocks is not None:
                break
            victim = self.running[-1]
            scheduled.pop(victim, None)
            spec.pop(victim, None)
            self._preempt(victim)
            if victim == id_:
                return
        scheduled[id_] = n + len(drafts)
        if drafts:
            spec[id_] = drafts
        cached.append(
            CachedRequestData(
                id_,
                blocks.get_block_ids(allow_none=True),
                request.num_computed_tokens,
            )
        )

    def _preempt(self, id_: str) -> None:
        request = self.requests[id_]
        self.running.remove(id_)
        self.waiting.insert(0, id_)
        self.kv.free(request)
        request.num_computed_tokens = 0
        self.drafts.pop(id_, None)
        self._preempted.add(id_)
        self.num_preemptions += 1

    def _admit(
        self,
        new: list[NewRequestData],
        cached: list[CachedRequestData],
        scheduled: dict[str, int],
    ) -> None:
        for id_ in list(self.waiting):
            request = self.requests[id_]
            blocks, hit = self.kv.get_computed_blocks(request)
            request.num_computed_tokens = hit
            n = self._cut(
                request,
                request.num_tokens - hit,
                self.budget - sum(scheduled.values()),
            )
            request.num_computed_tokens = 0
            fits = self.kv.can_fit_full_sequence(request, hit, blocks)
            if not n or not fits:
                return
            if self.kv.allocate_slots(request, n, hit, blocks) is None:
                return
            request.num_computed_tokens = hit
            self.waiting.remove(id_)
            self.running.append(id_)
            scheduled[id_] = n
            rows: BlockIds = self.kv.get_block_ids(id_)
            if id_ in self._known:
                cached.append(CachedRequestData(id_, rows, hit, resumed=True))
            else:
                tokens = list(request.all_token_ids)
                new.append(NewRequestData(id_, tokens, rows, hit))
            self._known.add(id_)

    def _update(self, output: SchedulerOutput) -> None:
        result = self.model.execute()
        for id_, n in output.num_scheduled_tokens.items():
            request = self.requests[id_]
            tokens = list(result.sampled_token_ids.get(id_, ()))
            drafts = len(output.scheduled_spec_decode_tokens.get(id_, ()))
            accepted = max(len(tokens) - 1, 0)
            self.num_accepted += accepted
            request.num_computed_tokens += n - drafts + accepted
            self.drafts[id_] = list(result.draft_token_ids.get(id_, ()))
            tokens = tokens[: self.left[id_]]
            self.left[id_] -= len(tokens)
            self.outputs[id_] += tokens
            request.append_output_token_ids(tokens)
            if not self.left[id_]:
                self.kv.free(request)
                self.running.remove(id_)
                self._finished.add(id_)
