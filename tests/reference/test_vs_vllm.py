"""Beside stock vLLM 0.32, same weights: equal tokens, hits and blocks, step by step."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvplugin.integration.demo.model import cache_folder, prepare_smollm2
from kvplugin.integration.demo.workload import documents
from kvplugin.integration.reference import EngineConfig, ReferenceEngine, load_model
from kvplugin.scheduler import SchedulerConfig
from tests.engine.host import EngineHost
from tests.reference.models import assert_empty
from tests.reference.traces import Greedy, Trace, of_ours, of_vllm

pytestmark = pytest.mark.engine


@dataclass(frozen=True)
class Setup:
    """Both engines' settings; a pool that is too small for what is asked at once."""

    dtype: str
    block_size: int
    num_blocks: int
    max_model_len: int
    budget: int
    """Tokens of a step: prompts are computed in chunks."""
    max_tokens: int
    rounds: int
    bound: float
    """How far logits may be apart: rounding in this dtype, in other orders of sums."""


SETUPS = (
    Setup("float32", 32, 12, 320, 96, 20, rounds=3, bound=1e-3),
    # Near 20, where this model's best logits are, numbers of bf16 are 0.125 apart.
    Setup("bfloat16", 128, 10, 512, 256, 16, rounds=2, bound=0.5),
)


@dataclass(frozen=True)
class Both:
    setup: Setup
    theirs: list[Trace]
    ours: list[Trace]

    @property
    def answers(self) -> list[tuple[Greedy, Greedy]]:
        return [
            pair
            for rounds in zip(self.theirs, self.ours, strict=True)
            for pair in zip(*(trace.answers for trace in rounds), strict=True)
        ]


@pytest.fixture(scope="module", params=SETUPS, ids=lambda setup: setup.dtype)
def both(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Both:
    setup: Setup = request.param
    folder = prepare_smollm2(cache_folder())
    rounds = _rounds(folder, setup.block_size)[: setup.rounds]
    log = tmp_path_factory.mktemp("vllm") / "log.txt"
    with ThreadPoolExecutor(1) as waiting:  # theirs is a process of its own
        theirs = waiting.submit(_serve_theirs, folder, setup, rounds, log)
        ours = _serve_ours(folder, setup, rounds)
        return Both(setup, theirs.result(), ours)


def _rounds(folder: Path, block: int) -> list[list[list[int]]]:
    """One prompt; then it with two that share its first two blocks and two that do not;
    then these five the other way round."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)

    def encode(text: str) -> list[int]:
        return list(tokenizer(text).input_ids)

    made = documents(3, 1, 400, lambda text: len(encode(text)))
    a, b, c = (encode(document.text) for document in made)
    first = a[: 2 * block + block // 4]
    batch = [
        a[: 3 * block + 5],
        a[: 2 * block] + b[: block // 2 + 3],
        b[: 2 * block],
        c[: block + block // 2],
        first,
    ]
    return [[first], batch, batch[::-1]]


def _serve_theirs(
    folder: Path, setup: Setup, rounds: Sequence[Sequence[list[int]]], log: Path
) -> list[Trace]:
    host = EngineHost(
        log,
        model=str(folder),
        skip_tokenizer_init=True,
        dtype=setup.dtype,
        block_size=setup.block_size,
        num_gpu_blocks_override=setup.num_blocks,
        kv_cache_memory_bytes=64 << 20,  # or it wants most of the machine's memory
        max_model_len=setup.max_model_len,
        max_num_batched_tokens=setup.budget,
        max_num_seqs=8,
    )
    try:
        return [host.run(of_vllm, batch, setup.max_tokens) for batch in rounds]
    finally:
        host.close()


def _serve_ours(
    folder: Path, setup: Setup, rounds: Sequence[Sequence[list[int]]]
) -> list[Trace]:
    config = EngineConfig(
        block_size=setup.block_size,
        num_blocks=setup.num_blocks,
        max_model_len=setup.max_model_len,
        record_logits=True,
        scheduler=SchedulerConfig(max_num_batched_tokens=setup.budget, max_num_seqs=8),
    )
    engine = ReferenceEngine(load_model(folder, setup.dtype), config)
    traces = [of_ours(engine, batch, setup.max_tokens) for batch in rounds]
    assert_empty(engine)
    return traces


# -- tokens ---------------------------------------------------------------------------


def count_equal(theirs: Greedy, ours: Greedy, bound: float) -> int:
    """How many tokens are equal from the first on.

    They may part only where both engines find the two best closer than `bound`; up to
    there the log-probabilities of what was chosen are closer than that. Behind it
    nothing is comparable.
    """
    columns = zip(theirs.tokens, ours.tokens, strict=True)
    for place, (one, other) in enumerate(columns):
        if one != other:
            assert max(theirs.gaps[place], ours.gaps[place]) < bound
            return place
        assert abs(theirs.logprobs[place] - ours.logprobs[place]) < bound
    return len(ours.tokens)


def test_tokens_part_only_where_rounding_decides(both: Both) -> None:
    setup = both.setup
    equal = [count_equal(*pair, setup.bound) for pair in both.answers]
    if setup.dtype == "float32":
        assert set(equal) == {setup.max_tokens}
    else:
        assert sum(equal) > len(equal) * setup.max_tokens / 2
        assert min(equal) >= 4


def test_another_prompts_answer_is_told_apart(both: Both) -> None:
    """The negative control: the comparison above can fail."""
    theirs, ours = both.theirs[1].answers, both.ours[1].answers
    with pytest.raises(AssertionError):
        count_equal(theirs[0], ours[3], both.setup.bound)


# -- blocks ---------------------------------------------------------------------------


def test_hits_are_equal(both: Both) -> None:
    hits = [(theirs.num_cached, ours.num_cached) for theirs, ours in both.answers]
    assert all(one == other for one, other in hits)
    block = both.setup.block_size
    assert [ours for _, ours in hits[1:6]] == [2 * block, 2 * block, 0, 0, 2 * block]


def test_every_step_has_the_same_requests_in_the_same_blocks(both: Both) -> None:
    """Ids of blocks too: both evict in the same order. Only ours ends with a step that
    tells the workers who has finished."""
    for theirs, ours in zip(both.theirs, both.ours, strict=True):
        assert ours.num_preemptions == theirs.num_preemptions
        assert ours.steps[:-1] == theirs.steps
        assert ours.steps[-1] == ((), 0)


def test_the_pool_was_too_small(both: Both) -> None:
    """Or the comparison of blocks would say little."""
    assert any(trace.num_preemptions for trace in both.ours)
    used = max(step.num_used for trace in both.ours for step in trace.steps)
    assert used >= both.setup.num_blocks - 2  # a request may have needed two at once
