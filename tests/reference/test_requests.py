"""Requests that come, end and are aborted; drafts of a drafter without layers."""

import pytest

from kvplugin.integration.reference import (
    ReferenceEngine,
    SamplingParams,
)
from kvplugin.request import RequestError
from tests.reference.drafters import Oracle
from tests.reference.models import (
    MIXES,
    assert_empty,
    compare,
    prompts,
    serve,
    settings,
    step_to_the_end,
    tiny,
)


@pytest.mark.parametrize("right", [0.0, 0.7, 1.0])
@pytest.mark.parametrize(
    ("mix", "mode"),
    [
        ("full+window", "align"),
        ("window+recurrent+full", "align"),
        ("window+recurrent+full", "all"),
        ("window+recurrent+full", "none"),
    ],
)
def test_drafts_accepted_and_rejected(mix: str, right: float, mode: str) -> None:
    model, batch = tiny(MIXES[mix]), prompts(3)
    oracle = Oracle(model, 3, right)
    config = settings(num_drafts=3, mamba_cache_mode=mode)
    params = SamplingParams(max_tokens=12)
    engine, seen = serve(
        model, config, [batch[:1], batch, batch], params=params, drafter=oracle
    )
    assert oracle.proposed
    assert seen.drafts
    plain, without = serve(
        model, settings(mamba_cache_mode=mode), [batch[:1], batch, batch], params=params
    )
    assert [a.token_ids for a in engine.answers.values()] == [
        a.token_ids for a in plain.answers.values()
    ]
    if right == 1.0:
        assert seen.steps < without.steps


def test_a_stop_token_ends_a_request() -> None:
    model, (prompt,) = tiny(MIXES["full"]), prompts(1)
    engine = ReferenceEngine(model, settings())
    (whole,) = engine.generate([prompt])
    stop = whole.token_ids[2]
    params = SamplingParams(stop_token_ids=(stop,))
    (answer,) = engine.generate([prompt], params)
    assert answer.finish_reason == "stop"
    assert answer.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
    assert_empty(engine)


@pytest.mark.parametrize("mix", ["full+window", "window+recurrent+full"])
def test_aborts_at_any_moment(mix: str) -> None:
    model = tiny(MIXES[mix])
    for moment in range(0, 8, 2):
        engine = ReferenceEngine(model, settings(max_num_batched_tokens=24))
        ids = [engine.add_request(prompt) for prompt in prompts(3)]
        for _ in range(moment):
            engine.step()
        engine.abort(ids[1])
        step_to_the_end(engine)
        assert engine.answers[ids[1]].finish_reason == "abort"
        assert engine.answers[ids[0]].finish_reason == "length"
        assert_empty(engine)


def test_other_salts_share_nothing() -> None:
    engine = ReferenceEngine(tiny(MIXES["full"]), settings())
    (prompt,) = prompts(1)
    for salt, hits in (("a", False), ("b", False), ("a", True)):
        req_id = engine.add_request(prompt, cache_salt=salt)
        engine.run()
        assert bool(engine.answers[req_id].num_cached_tokens) == hits


def test_requests_that_can_never_be_served_are_refused() -> None:
    engine = ReferenceEngine(tiny(MIXES["full"]), settings())
    with pytest.raises(RequestError, match="max_model_len"):
        engine.add_request(list(range(60)))
    with pytest.raises(RequestError, match="max_num_encoder_input_tokens"):
        engine.add_request([1], encoder_token_ids=[1])
    assert not engine.has_work()


def test_a_reset_forgets_what_was_cached() -> None:
    engine = ReferenceEngine(tiny(MIXES["full"]), settings())
    (prompt,) = prompts(1)
    engine.generate([prompt])
    assert engine.generate([prompt])[0].num_cached_tokens
    assert engine.reset_prefix_cache()
    assert not engine.generate([prompt])[0].num_cached_tokens


@pytest.mark.parametrize("right", [0.7, pytest.param(1.0, marks=pytest.mark.full)])
@pytest.mark.parametrize("mode", ["all", "align"])
def test_the_next_turn_hits_states_that_drafts_left(mode: str, right: float) -> None:
    """A block's end that accepted drafts have passed is hit later, state included."""
    model, params = tiny(MIXES["full+recurrent"]), SamplingParams(max_tokens=30)
    config = settings(num_drafts=3, mamba_cache_mode=mode, max_model_len=160)
    engine = ReferenceEngine(model, config, drafter=Oracle(model, 3, right))
    first = prompts(3, common=10)
    answers = engine.generate(first, params)
    turns = [p + a.token_ids + [7] for p, a in zip(first, answers, strict=True)]
    for turn, answer in zip(turns, engine.generate(turns, params), strict=True):
        assert answer.num_cached_tokens >= 40
        compare(model, turn, answer)
    assert_empty(engine)
