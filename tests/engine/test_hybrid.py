"""Models with windows, recurrent states and latent attention on stock vLLM: what comes
out of host memory is what was computed, for every group."""

from collections.abc import Iterator
from typing import Any

import pytest

from kvplugin.integration.demo.model import cache_folder
from tests.engine import asking, faults, hybrids
from tests.engine.asking import assert_close, assert_same
from tests.engine.host import EngineHost, offload
from tests.engine.hybrids import HYBRIDS, Hybrid

LONG_NOISE = 0.1
"""Of hundreds of tokens, some computed one by one and some, after a preemption, as a
prompt: vLLM alone differs by 0.03."""


@pytest.fixture(scope="module", params=HYBRIDS, ids=lambda hybrid: hybrid.name)
def model(request: Any) -> Hybrid:
    return request.param


@pytest.fixture(scope="module")
def engine(
    model: Hybrid, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineHost]:
    host = EngineHost(
        tmp_path_factory.mktemp(model.name) / "log.txt",
        **model.arguments(cache_folder() / "tests"),
        kv_transfer_config=offload(cpu_bytes=64 << 20),
    )
    yield host
    host.close()


@pytest.fixture(autouse=True)
def nothing_leaks(engine: EngineHost) -> Any:
    yield
    assert not any(engine.run(asking.balance).values())
    # At once, with no step in between: the last answer's stores hold nothing.
    assert engine.run(asking.reset, True)


def counted(engine: EngineHost, name: str) -> float:
    return engine.run(asking.metrics).get(f"vllm:kvplugin_offload_{name}", 0.0)


def local_answer(engine: EngineHost, model: Hybrid, prompt: list[int]) -> asking.Answer:
    """The answer after a hit that brings what host memory will bring. Without vLLM's
    own hits that is one from host memory; `test_...` compare it with a cold one."""
    answer = engine.run(asking.ask_one, prompt)
    assert answer.cached_tokens == model.most(prompt)
    return answer


def differ(right: asking.Answer, wrong: asking.Answer, noise: float) -> bool:
    """By more than noise, before their tokens part or where they do."""
    for ours, theirs, token, other in zip(
        right.candidates, wrong.candidates, right.tokens, wrong.tokens, strict=True
    ):
        if token not in theirs or abs(ours[token] - theirs[token]) > noise:
            return True
        if token != other:
            return False
    return False


def test_every_group_is_served(engine, model):
    assert engine.run(asking.number_of_groups) == model.groups
    log = engine.log.read_text()
    assert "kvplugin offload: " in log
    assert "kvplugin offload is idle" not in log


def test_a_loaded_prefix_answers_like_a_local_hit(engine, model):
    prompt = model.prompt("loaded", 3, 40)
    cold = engine.run(asking.ask_one, prompt)
    local = local_answer(engine, model, prompt)
    assert engine.run(asking.reset)
    before = counted(engine, "loaded_tokens")
    loaded = engine.run(asking.ask_one, prompt)

    assert cold.cached_tokens == 0
    assert loaded.cached_tokens == model.most(prompt)
    assert counted(engine, "loaded_tokens") - before == model.most(prompt)
    assert_same(local, loaded)
    assert_close(cold, loaded, model.noise)


def test_a_wrong_byte_in_any_group_is_seen_in_the_answer(engine, model):
    """The negative control: the comparisons of this file can fail, for each group."""
    prompt = model.prompt("control", 3, 40)
    engine.run(asking.ask_one, prompt)
    right = local_answer(engine, model, prompt)
    for group in range(model.groups):
        assert engine.run(asking.reset)
        assert engine.run(asking.corrupt_group, group)
        wrong = engine.run(asking.ask_one, prompt)
        assert engine.run(asking.corrupt_group, group)
        assert wrong.cached_tokens == model.most(prompt)
        with pytest.raises(AssertionError):
            assert_same(right, wrong)
        assert differ(right, wrong, model.noise)
    assert engine.run(asking.reset)
    assert_same(right, engine.run(asking.ask_one, prompt))


def test_prompts_that_evict_each_other_come_back(engine, model):
    prompts = [model.prompt(f"evict {i}", 5, 40) for i in range(3)]
    first = [engine.run(asking.ask_one, prompt) for prompt in prompts]
    before = counted(engine, "loaded_tokens")
    second = [engine.run(asking.ask_one, prompt) for prompt in prompts]

    assert counted(engine, "loaded_tokens") > before
    for prompt, cold, loaded in zip(prompts, first, second, strict=True):
        assert (cold.cached_tokens, loaded.cached_tokens) == (0, model.most(prompt))
        assert_close(cold, loaded, model.noise)


def test_a_second_question_hits_the_document(engine, model):
    """At vLLM's default retention, which keeps no window or state inside a prompt."""
    document = model.prompt("document", 3, 40)
    one = document + model.prompt("one", 1, 60)
    other = document + model.prompt("other", 0, 50)
    cold = engine.run(asking.ask_one, other)
    assert engine.run(asking.reset, True)
    engine.run(asking.ask_one, one)
    before = counted(engine, "loaded_tokens")
    loaded = engine.run(asking.ask_one, other)

    assert loaded.cached_tokens == model.most(document)
    assert counted(engine, "loaded_tokens") > before
    assert_close(cold, loaded, model.noise)


@pytest.mark.parametrize("more", [0, 1])
def test_the_last_token_is_always_computed(engine, model, more):
    prompt = model.prompt("exact", 2, more)
    cold = engine.run(asking.ask_one, prompt)
    assert engine.run(asking.reset)
    loaded = engine.run(asking.ask_one, prompt)

    assert loaded.cached_tokens == model.most(prompt) < len(prompt)
    assert_close(cold, loaded, model.noise)


def test_a_load_continues_where_the_local_hit_ends(engine, model):
    if not model.caches:
        pytest.skip("vLLM keeps no hits of its own of this model on a CPU")
    prompt = model.prompt("continued", 3, 40)
    engine.run(asking.ask_one, prompt)
    local = local_answer(engine, model, prompt)
    assert engine.run(asking.reset)
    engine.run(asking.ask_one, prompt[: 2 * model.block + 1])
    before = counted(engine, "loaded_tokens")
    loaded = engine.run(asking.ask_one, prompt)

    assert loaded.cached_tokens == 3 * model.block
    assert counted(engine, "loaded_tokens") - before == model.block
    assert_same(local, loaded)


def test_requests_that_arrive_together_are_answered_alike(engine, model):
    shared = model.prompt("together", 2, 10)
    prompts = [[*shared, 100 + i] for i in range(3)]
    alone = [engine.run(asking.ask_one, prompt) for prompt in prompts]
    assert engine.run(asking.reset)
    together = engine.run(asking.ask, prompts)

    for one, other in zip(alone, together, strict=True):
        assert other.cached_tokens == model.most(prompts[0])
        assert_close(one, other, model.noise)


def test_answers_survive_preemption(engine, model):
    generated = 2 * 128 + 12
    prompts = [model.prompt(f"preempted {i}", 1, 100) for i in range(3)]
    alone = [engine.run(asking.ask_one, prompt, generated) for prompt in prompts]
    assert engine.run(asking.reset, True)
    before = engine.run(asking.preemptions)
    together = engine.run(asking.ask, prompts, generated)

    assert (engine.run(asking.preemptions) > before) == model.preempts
    for one, other in zip(alone, together, strict=True):
        assert_close(one, other, LONG_NOISE)


def test_a_failed_load_is_recomputed(engine, model):
    prompt = model.prompt("failed", 3, 40)
    cold = engine.run(asking.ask_one, prompt)
    assert engine.run(asking.reset)
    before = counted(engine, "failed_loads")
    engine.run(faults.fail_copies, "load")
    answer = engine.run(asking.ask_one, prompt)
    engine.run(faults.fail_copies, "")

    assert counted(engine, "failed_loads") == before + 1
    assert answer.finish_reason == "length"
    assert_same(cold, answer)
    # What failed was not kept, what was computed since was stored afresh.
    assert engine.run(asking.reset)
    again = engine.run(asking.ask_one, prompt)
    assert again.cached_tokens == model.most(prompt)
    assert_close(cold, again, model.noise)


def test_a_failed_load_ends_the_request_where_that_is_wanted(engine, model):
    prompt = model.prompt("fails", 3, 40)
    cold = engine.run(asking.ask_one, prompt)
    assert engine.run(asking.reset)
    engine.run(asking.set_failure_policy, "fail")
    engine.run(faults.fail_copies, "load")
    failed = engine.run(asking.ask_one, prompt)
    engine.run(faults.fail_copies, "")
    engine.run(asking.set_failure_policy, "recompute")

    assert failed.finish_reason == "error"
    assert_same(cold, engine.run(asking.ask_one, prompt))


def test_a_failed_store_is_never_served(engine, model):
    prompt = model.prompt("not stored", 3, 40)
    engine.run(faults.fail_copies, "store")
    cold = engine.run(asking.ask_one, prompt)
    engine.run(faults.fail_copies, "")
    assert engine.run(asking.reset)
    again = engine.run(asking.ask_one, prompt)

    assert again.cached_tokens == 0
    assert_same(cold, again)


def test_a_request_is_aborted_while_it_loads(engine, model):
    prompt = model.prompt("aborted", 3, 40)
    cold = engine.run(asking.ask_one, prompt)
    assert engine.run(asking.reset)
    assert engine.run(hybrids.abort_while_loading, prompt)
    assert not any(engine.run(asking.balance).values())
    answer = engine.run(asking.ask_one, prompt)

    assert answer.cached_tokens == model.most(prompt)
    assert_close(cold, answer, model.noise)
