"""Two steps in flight, each with drafts to verify: of two requests in turn, one waits
until nothing of it is in flight while the other one computes."""

from collections import deque

import pytest

from kvplugin.block import NULL_BLOCK
from kvplugin.hooks import Hooks
from kvplugin.kv_cache_blocks import KVCacheBlocks
from kvplugin.manager import KVCacheManager
from kvplugin.request import Request
from kvplugin.scheduler.output import (
    CachedRequestData,
    ModelOutput,
    NewRequestData,
    SchedulerOutput,
)
from kvplugin.spec import EngineLimits, KVCacheSpec
from kvplugin.testing import ToyModel, watched_content
from kvplugin.testing.toy_reference import propose
from tests.core.manager_setups import FORMAT, chunk, full, mamba, window
from tests.testing.driver import MAX_LEN, config_of
from tests.testing.lab import Lab

TOKENS = 40


class Turns:
    """Requests that take turns; a step is executed when the next one is in flight."""

    def __init__(self, specs: tuple[KVCacheSpec, ...], drafts: int) -> None:
        config = config_of(specs, 200)
        self.kv = KVCacheManager(
            config,
            MAX_LEN,
            4,
            limits=EngineLimits(
                max_model_len=MAX_LEN,
                max_num_batched_tokens=16,
                max_concurrent_batches=2,
                num_lookahead_tokens=drafts,
            ),
            hash_format=FORMAT,
            hooks=Hooks.of(),
        )
        self.lookahead = drafts
        self.memory = watched_content(config, self.kv.block_pool)
        self.model = ToyModel(
            self.memory,
            depth=2,
            num_drafts=drafts,
            num_lookahead_tokens=drafts,
            max_model_len=MAX_LEN,
        )
        self.requests = [
            Request(name, range(n), hash_format=FORMAT, hash_block_size=4)
            for name, n in (("a", 8), ("b", 12))
        ]
        self.drafts: dict[str, list[int]] = {"a": [], "b": []}
        self.scheduled: deque[tuple[Request, int, int]] = deque()
        self.accepted = self.rejected = self.steps = 0

    def schedule(self, request: Request) -> None:
        """All that is known of it, and its drafts."""
        assert request not in [other for other, _, _ in self.scheduled]
        name, computed = request.request_id, request.num_computed_tokens
        drafts = self.drafts[name]
        n = request.num_tokens - computed + len(drafts)
        self.kv.new_step_starts()
        blocks = self.kv.allocate_slots(request, n, num_lookahead_tokens=self.lookahead)
        assert blocks is not None
        self.steps += 1
        self.model.submit(self._output(request, blocks, n, drafts))
        self.scheduled.append((request, n, len(drafts)))

    def _output(
        self, request: Request, blocks: KVCacheBlocks, n: int, drafts: list[int]
    ) -> SchedulerOutput:
        name, computed = request.request_id, request.num_computed_tokens
        new, cached = [], []
        if computed:
            ids = blocks.get_block_ids(allow_none=True)
            cached.append(CachedRequestData(name, ids, computed))
        else:
            tokens, rows = list(request.all_token_ids), self.kv.get_block_ids(name)
            new.append(NewRequestData(name, tokens, rows, 0))
        return SchedulerOutput(
            self.steps,
            new,
            cached,
            {name: n},
            {name: drafts} if drafts else {},
            new_block_ids_to_zero=self.kv.take_new_block_ids(),
        )

    def land(self) -> None:
        output = self.model.execute()
        request, n, drafts = self.scheduled.popleft()
        name = request.request_id
        tokens = list(output.sampled_token_ids[name])
        accepted = len(tokens) - 1
        self.accepted += accepted
        self.rejected += drafts - accepted
        request.num_computed_tokens += n - drafts + accepted
        request.append_output_token_ids(tokens)
        self._check_fresh(request, output)
        self.drafts[name] = list(output.draft_token_ids[name])

    def _check_fresh(self, request: Request, output: ModelOutput) -> None:
        """They follow the last token of this output, whatever was drafted before."""
        histories = self.model._requests._requests[request.request_id].histories
        assert len(histories) == request.num_tokens
        groups, identity = self.memory.groups, self.model._identity_of("")
        wanted = propose(groups, identity, histories, self.lookahead)
        assert output.draft_token_ids[request.request_id] == wanted

    def run(self) -> None:
        while min(request.num_output_tokens for request in self.requests) < TOKENS:
            for request in self.requests:
                self.schedule(request)
                if self.model.is_full:
                    self.land()
        self.land()


@pytest.mark.parametrize("drafts", [1, 2, 4])
@pytest.mark.parametrize(
    "groups",
    [
        lambda _: (full(),),
        lambda _: (full(), window(6)),
        lambda _: (chunk(8), full()),
        lambda n: (full(), mamba("all", 4, drafts=n)),
        lambda n: (full(), mamba("align", 4, drafts=n)),
    ],
)
def test_drafts_are_fresh_and_verified(groups: object, drafts: int) -> None:
    turns = Turns(groups(drafts), drafts)  # type: ignore[operator]
    turns.run()
    assert turns.accepted
    assert turns.rejected
    for request in turns.requests:
        prompt = request.all_token_ids[: request.num_prompt_tokens]
        expected = turns.model.reference(prompt, request.num_output_tokens)
        assert request.output_token_ids == expected
    rows = [turns.kv.get_block_ids(r.request_id) for r in turns.requests]
    assert any(block != NULL_BLOCK for row in rows[0] for block in row)


@pytest.mark.parametrize("drafts", [1, 4])
def test_a_lab_with_drafts_and_two_steps_in_flight(drafts: int) -> None:
    """Whether the scheduler verifies them or not."""
    specs = (full(), window(6), mamba("all", drafts=drafts))
    lab = Lab(specs, 40, depth=2, drafts=drafts, lookahead=drafts)
    for i in range(5):
        lab.add([*range(4 * i), *range(50 + i, 60)], 5 + 2 * i)
    lab.drain()
    assert [len(tokens) for tokens in lab.outputs.values()] == [5, 7, 9, 11, 13]
