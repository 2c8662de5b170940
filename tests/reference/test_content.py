"""The content model under the engine sees every wrong place, and nothing else."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from msgspec import structs

from kvplugin.connectors.offload.config import OffloadConfig
from kvplugin.connectors.offload.messages import CopyOrder
from kvplugin.connectors.offload.scheduler import OffloadScheduler
from kvplugin.connectors.offload.worker import OffloadWorker
from kvplugin.integration.reference import (
    AttentionDrafter,
    LayerConfig,
    Model,
    ReferenceEngine,
    SamplingParams,
    random_draft_model,
)
from kvplugin.integration.reference.content import ContentWatch, watched_offload
from kvplugin.integration.reference.layers.softmax import Sight
from kvplugin.integration.reference.paged import PagedTokens
from kvplugin.integration.reference.ranks import Drafter
from kvplugin.integration.reference.states import StatePlan, StateRows
from kvplugin.testing import (
    COMPLETES,
    FAILS,
    LATE,
    REPORTED_LATE,
    TORN,
    TWICE,
    ContentError,
    FaultyTransport,
)
from kvplugin.worker.block_table import BlockTables
from kvplugin.worker.zeroing import BlockZeroing
from tests.reference import test_random_runs
from tests.reference.bench import offload_over
from tests.reference.drafters import Oracle
from tests.reference.models import (
    CROSS,
    FULL,
    MIXES,
    MLA,
    SINK,
    WINDOW,
    assert_empty,
    compare,
    fewest_blocks,
    prompts,
    settings,
    step_to_the_end,
    tiny,
)

OFFLOAD = OffloadConfig(cpu_bytes_to_use=8 << 20, offload_prompt_only=False)


@pytest.mark.parametrize(
    "seed",
    [
        *range(100, 104),
        *(pytest.param(n, marks=pytest.mark.full) for n in range(104, 160)),
    ],
)
def test_random_runs_touch_only_what_is_theirs(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def watched(*args: Any, **options: Any) -> ReferenceEngine:
        return ReferenceEngine(*args, content=ContentWatch(), **options)

    monkeypatch.setattr(test_random_runs, "ReferenceEngine", watched)
    test_random_runs.test_answers_stay_right_whatever_happens(seed)


FATES = [COMPLETES, COMPLETES, LATE, REPORTED_LATE, TWICE, FAILS, TORN]


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(n, marks=pytest.mark.full) for n in range(2, 24))]
)
def test_transfers_that_go_wrong_touch_only_what_is_theirs(seed: int) -> None:
    """Random fates of random transfers, into a pool under pressure."""
    rng, watch = random.Random(seed), ContentWatch()
    model = tiny(rng.choice([(FULL, FULL), (FULL, MLA), (SINK, SINK)]), seed=seed)
    block_bytes = 2 * 4 * 2 * 16 * 8
    config = OffloadConfig(cpu_bytes_to_use=20 * block_bytes, offload_prompt_only=False)
    engine = ReferenceEngine(
        model,
        settings(
            num_blocks=22,
            scheduler_reserve_full_isl=False,
            tensor_parallel_size=rng.choice([1, 2]),
        ),
        offload_over(
            watch,
            config,
            lambda real: FaultyTransport(
                real.execute, lambda job: FATES[(job.id * 7 + seed) % len(FATES)]
            ),
        ),
        content=watch,
    )
    batch, params = prompts(5, common=6, own=14), SamplingParams(max_tokens=20)
    for _ in range(3):
        rng.shuffle(batch)
        ids = [engine.add_request(prompt, params) for prompt in batch]
        step_to_the_end(engine)
        for req_id, prompt in zip(ids, batch, strict=True):
            compare(model, prompt, engine.answers[req_id], params=params)
        engine.reset_prefix_cache(local_only=True)
    assert_empty(engine)
    engine.close()


def test_kinds_that_random_runs_leave_out() -> None:
    """An encoder's rows and kernel blocks that are smaller than the manager's."""
    encoder, params = [3, 1, 4, 1, 5], SamplingParams(max_tokens=8)
    config = settings(enable_prefix_caching=False, max_num_encoder_input_tokens=12)
    model, batch = tiny((FULL, CROSS, WINDOW)), prompts(3)
    engine = ReferenceEngine(model, config, content=ContentWatch())
    answers = engine.generate(batch, params, encoder_token_ids=[encoder] * 3)
    for prompt, answer in zip(batch, answers, strict=True):
        compare(model, prompt, answer, encoder=encoder)
    small = settings(
        backend="FLASH_ATTN", block_size=32, kernel_block_size=16, max_model_len=96
    )
    watch = ContentWatch()
    engine = ReferenceEngine(tiny(MIXES["full"]), small, content=watch)
    engine.generate(prompts(3, common=37), params)
    contents = watch.memories[0].values()
    assert any(memory.content(1, 31) != memory.content(2, 31) for memory in contents)


@pytest.mark.parametrize("mix", ["full", "full+window", "window+recurrent+full"])
def test_a_drafter_with_kv_of_its_own(mix: str) -> None:
    """Under pressure, and with hits on its rows."""
    model, config = tiny(MIXES[mix]), settings(num_drafts=3, max_model_len=96)
    blocks = fewest_blocks(model, config) + 24
    config = structs.replace(config, num_blocks=blocks)
    drafter = AttentionDrafter(random_draft_model(model), config)
    engine = ReferenceEngine(model, config, drafter=drafter, content=ContentWatch())
    batch, params = prompts(4), SamplingParams(max_tokens=16)
    for _ in range(2):
        answers = engine.generate(batch, params)
        for prompt, answer in zip(batch, answers, strict=True):
            compare(model, prompt, answer)
        engine.check()
        batch = [p + a.token_ids for p, a in zip(batch, answers, strict=True)]


def test_host_copies_are_seen() -> None:
    watch, batch = ContentWatch(), prompts(3)
    model, connector = tiny((FULL, MLA)), watched_offload(OFFLOAD, watch)
    engine = ReferenceEngine(model, settings(), connector, content=watch)
    engine.generate(batch)
    assert engine.reset_prefix_cache(local_only=True)
    for prompt, answer in zip(batch, engine.generate(batch), strict=True):
        assert answer.num_cached_tokens == 20
        compare(model, prompt, answer)
    engine.close()


def test_a_transfer_that_nobody_wrapped_counts_as_never_written() -> None:
    watch, batch = ContentWatch(), prompts(1)
    connector = watched_offload(OFFLOAD, ContentWatch())
    engine = ReferenceEngine(tiny((FULL,)), settings(), connector, content=watch)
    engine.generate(batch)
    assert engine.reset_prefix_cache(local_only=True)
    with pytest.raises(ContentError, match="holds"):
        engine.generate(batch)
    engine.close()


def test_off_by_default() -> None:
    """Without a watch nothing stands between the engine and its memory."""
    engine = ReferenceEngine(tiny(MIXES["full"]), settings())
    (runner,) = engine.ranks.runners
    assert type(runner).__name__ == "Runner"
    assert "get_new_blocks" not in vars(engine.manager.block_pool)


# -- faults that are put into the engine ----------------------------------------------


def wrong_slot(patch: pytest.MonkeyPatch) -> None:
    """A row lands one slot further."""

    def append(self: Any, *rows: torch.Tensor) -> None:
        self._store.write(rows, self._slots + 1)

    patch.setattr(PagedTokens, "append", append)


def one_layer_writes_nothing(patch: pytest.MonkeyPatch) -> None:
    """Of one layer in a group only."""
    original = PagedTokens.append
    calls = []

    def append(self: Any, *rows: torch.Tensor) -> None:
        calls.append(self)
        if len(calls) % 2:
            original(self, *rows)

    patch.setattr(PagedTokens, "append", append)


def stale_row_after_a_move(patch: pytest.MonkeyPatch) -> None:
    """The last request takes an ended one's row of the batch, not of the tables."""
    patch.setattr(BlockTables, "move", lambda self, source, target: None)
    patch.setattr(BlockTables, "clear", lambda self, row: None)


def rows_are_not_swapped(patch: pytest.MonkeyPatch) -> None:
    """Requests that sit out a step keep their place in the tables."""
    patch.setattr(BlockTables, "swap", lambda self, one, other: None)


def no_zeroing(patch: pytest.MonkeyPatch) -> None:
    """New blocks of states hold what somebody left."""
    patch.setattr(BlockZeroing, "zero", lambda self, ids: 0)


def state_copied_from_the_wrong_block(patch: pytest.MonkeyPatch) -> None:
    """The end of a block gets the state of the block behind it."""
    original = StateRows.settle

    def settle(self: Any, req_id: str, accepted: int) -> list[tuple[int, int]]:
        copies = original(self, req_id, accepted)
        row = self._rows[req_id]
        return [(row.blocks[row.places[-1]], target) for _, target in copies]

    patch.setattr(StateRows, "settle", settle)


def state_of_another_entry(patch: pytest.MonkeyPatch) -> None:
    """A step goes on from the state of the block before."""
    original = StateRows.plan

    def plan(self: Any, req_id: str, blocks: Sequence[int], *counts: int) -> StatePlan:
        found = original(self, req_id, blocks, *counts)
        at = list(blocks).index(found.source)
        return StatePlan(blocks[max(at - 1, 0)], found.targets)

    patch.setattr(StateRows, "plan", plan)


def window_read_too_far(patch: pytest.MonkeyPatch) -> None:
    """One block more than the window, while the pool has not taken it back."""
    original = Sight.first

    def first(self: Sight, position: int) -> int:
        return max(original(self, position) - 4, 0)

    patch.setattr(Sight, "first", first)


def rejected_draft_stays(patch: pytest.MonkeyPatch) -> None:
    """A slot that has KV is not written again, so a rejected draft's row stays."""
    written: dict[int, set[int]] = {}

    def append(self: Any, *rows: torch.Tensor) -> None:
        known = written.setdefault(id(self._store), set())
        fresh = [-1 if slot in known else slot for slot in self._slots.tolist()]
        known.update(fresh)
        self._store.write(rows, torch.tensor(fresh))

    patch.setattr(PagedTokens, "append", append)


def key_without_salt(patch: pytest.MonkeyPatch) -> None:
    """Tenants share what they must not."""
    original = ReferenceEngine.add_request

    def add_request(self: Any, *args: Any, cache_salt: Any = None, **more: Any) -> str:
        req_id = original(self, *args, **more)
        self.scheduler.requests[req_id].request.cache_salt = cache_salt
        return req_id

    patch.setattr(ReferenceEngine, "add_request", add_request)


def loads_from_other_host_blocks(patch: pytest.MonkeyPatch) -> None:
    """The blocks of a load in another order."""
    original = OffloadWorker._submit

    def submit(self: Any, order: CopyOrder, *, store: bool) -> None:
        if not store:
            parts = [
                structs.replace(part, host_ids=[*part.host_ids[1:], part.host_ids[0]])
                for part in order.parts
            ]
            order = structs.replace(order, parts=parts)
        original(self, order, store=store)

    patch.setattr(OffloadWorker, "_submit", submit)


def stores_hold_nothing(patch: pytest.MonkeyPatch) -> None:
    """Blocks are given back while a transfer reads them."""

    class Nothing:
        def acquire(self, ids: Sequence[int]) -> None: ...
        def release(self, ids: Sequence[int]) -> None: ...

    original = OffloadScheduler.bind_blocks
    patch.setattr(
        OffloadScheduler, "bind_blocks", lambda self, _: original(self, Nothing())
    )


@dataclass(frozen=True)
class Situation:
    """A run in which a fault comes to light."""

    layers: Sequence[LayerConfig] = (FULL, FULL)
    changes: tuple[tuple[str, Any], ...] = ()
    drafts: bool = False
    salts: bool = False
    host: bool = False
    chat: bool = False
    """Each turn goes on from the answers of the last."""

    def run(self) -> None:
        model, watch = tiny(self.layers), ContentWatch()
        drafter: Drafter | None = self._drafter(model)
        changes = dict(self.changes) | ({"num_drafts": 3} if self.drafts else {})
        late = offload_over(
            watch, OFFLOAD, lambda real: FaultyTransport(real.execute, lambda job: LATE)
        )
        engine = ReferenceEngine(
            model,
            settings(**changes),
            late if self.host else None,
            drafter=drafter,
            content=watch,
        )
        batch = prompts(4)
        for turn in range(3):
            ids = [
                engine.add_request(
                    prompt,
                    SamplingParams(max_tokens=4 + 5 * number),
                    cache_salt=str(turn) if self.salts else None,
                )
                for number, prompt in enumerate(batch)
            ]
            step_to_the_end(engine)
            if self.chat:
                answers = [engine.answers[req_id].token_ids for req_id in ids]
                batch = [p + a + [7] for p, a in zip(batch, answers, strict=True)]
            if self.host:
                engine.reset_prefix_cache(local_only=True)
        engine.close()

    def _drafter(self, model: Model) -> Drafter | None:
        return Oracle(model, 3, 0.6) if self.drafts else None


RECURRENT = MIXES["full+recurrent"]
FAULTS: dict[Callable[[pytest.MonkeyPatch], None], Situation] = {
    wrong_slot: Situation(),
    one_layer_writes_nothing: Situation(),
    stale_row_after_a_move: Situation(),
    rows_are_not_swapped: Situation(changes=(("pipeline_depth", 2),)),
    no_zeroing: Situation(RECURRENT),
    state_copied_from_the_wrong_block: Situation(
        RECURRENT,
        (("mamba_cache_mode", "all"), ("max_model_len", 128)),
        drafts=True,
        chat=True,
    ),
    state_of_another_entry: Situation(RECURRENT),
    window_read_too_far: Situation((WINDOW, WINDOW)),
    rejected_draft_stays: Situation(drafts=True),
    key_without_salt: Situation(salts=True),
    loads_from_other_host_blocks: Situation(host=True),
    stores_hold_nothing: Situation(host=True, changes=(("num_blocks", 40),)),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_planted_faults_are_found(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    FAULTS[fault].run()  # without the fault all is well
    fault(monkeypatch)
    with pytest.raises(ContentError):
        FAULTS[fault].run()
