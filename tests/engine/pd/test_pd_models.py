"""Every kind of KV cache group, handed over between blocks of every size."""

import itertools
from collections.abc import Iterator

import pytest

from tests.engine import asking
from tests.engine.asking import Answer, assert_close
from tests.engine.host import EngineHost
from tests.engine.pd import faults, handing
from tests.engine.pd.hosts import Engines, counted, ours
from tests.engine.pd.models import (
    GEMMA_3,
    GPT,
    LATENT,
    LLAMA,
    SMOLLM2,
    STATES,
    Handed,
)
from tests.engine.prompts import tokens

DEFAULT = [(GEMMA_3, 64, 128)]
"""(model, block size of one engine, of the other); each hands over to the other."""


def _full() -> list[tuple[Handed, int, int]]:
    every = [
        (model, *sizes)
        for model in (LLAMA, SMOLLM2, GEMMA_3, GPT, LATENT, STATES)
        for sizes in itertools.combinations_with_replacement(model.block_sizes, 2)
    ]
    return [case for case in every if case not in DEFAULT]


def _named(case: tuple[Handed, int, int]) -> str:
    return f"{case[0].name} {case[1]} and {case[2]}"


@pytest.fixture(
    scope="module",
    params=[*DEFAULT, *(pytest.param(c, marks=pytest.mark.full) for c in _full())],
    ids=_named,
)
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Handed, EngineHost, EngineHost]]:
    model, one, other = request.param
    started = Engines(tmp_path_factory.mktemp("engines"), **model.arguments())
    try:
        yield (
            model,
            *started.start_all(
                *(
                    {
                        "config": ours("both", kv_lease_duration=120.0),
                        "block_size": size,
                        "prepare": faults.reads_can_be_watched,
                    }
                    for size in (one, other)
                )
            ),
        )
    finally:
        started.close()


def lengths(model: Handed) -> list[int]:
    """Around the ends of blocks and windows."""
    block = max(model.block_sizes)
    return [block - 1, block, block + 1, 700]


def alone(
    model: Handed, engine: EngineHost, prompts: list[list[int]], count: int
) -> list[Answer]:
    """What the engine answers by itself, and has forgotten after."""
    if model.has_states:
        answers = [engine.run(handing.stepped, prompt) for prompt in prompts]
    else:
        answers = engine.run(asking.ask, prompts, count)
    assert engine.run(asking.reset_within_a_second)
    return answers


def hand_over(
    model: Handed, producer: EngineHost, consumer: EngineHost, prompts: list[list[int]]
) -> None:
    """Every prompt is read, and every answer is the consumer's own."""
    before = counted(consumer, "reads")
    params = producer.run(handing.prefill, prompts)
    answers = consumer.run(
        handing.decode, prompts, params, 3 if model.has_states else 8
    )
    assert counted(consumer, "reads") == before + len(prompts)
    settled(producer, consumer)
    assert consumer.run(asking.reset_within_a_second)
    if model.has_states:
        for prompt, answer in zip(prompts, answers, strict=True):
            handing.assert_goes_on(consumer, prompt, answer, model.noise)
        return
    expected = alone(model, consumer, prompts, 8)
    for answer, other in zip(answers, expected, strict=True):
        assert_close(other, answer, model.noise)


def settled(*hosts: EngineHost) -> None:
    for host in hosts:
        assert not any(host.run(handing.settle).values())


@pytest.mark.parametrize("back", [False, True], ids=["there", "back"])
def test_the_text_is_that_of_one_engine(engines, back):
    model, *hosts = engines
    producer, consumer = reversed(hosts) if back else hosts
    prompts = [
        tokens(f"{model.name} {back} {length}", length) for length in lengths(model)
    ]
    hand_over(model, producer, consumer, prompts)


@pytest.mark.parametrize("blocks", [2, pytest.param(23, marks=pytest.mark.full)])
def test_what_was_read_is_what_a_local_hit_finds(engines, blocks):
    """To the bit, where both compute the last token and nothing else."""
    model, producer, consumer = engines
    if model is LATENT:
        pytest.skip("vLLM keeps no hits of its own of this model on a CPU")
    if model.has_states:
        pytest.skip("states are handed over a token before a local hit's end")
    length = blocks * max(model.block_sizes) + 1
    prompt = tokens(f"{model.name} to the bit {length}", length)
    consumer.run(asking.ask_one, prompt, 8)
    hit = consumer.run(asking.ask_one, prompt, 8)
    assert consumer.run(asking.reset_within_a_second)
    params = producer.run(handing.prefill, [prompt])
    (answer,) = consumer.run(handing.decode, [prompt], params, 8)
    assert hit.cached_tokens == length - 1
    assert (answer.tokens, answer.candidates) == (hit.tokens, hit.candidates)
    assert consumer.run(asking.reset_within_a_second)
    settled(producer, consumer)


def test_wrong_bytes_of_any_group_would_have_been_noticed(engines):
    model, producer, consumer = engines
    prompt = tokens(f"{model.name} zeroed", 600)
    count = 1 if model.has_states else 8
    (expected,) = alone(model, consumer, [prompt], count)
    noticed = []
    for group in range(model.groups):
        assert consumer.run(asking.reset_within_a_second)
        params = producer.run(handing.prefill, [prompt])
        consumer.run(faults.zero_group, group)
        (answer,) = consumer.run(handing.decode, [prompt], params, count)
        consumer.run(faults.zero_group, None)
        try:
            assert_close(expected, answer, model.noise)
        except AssertionError:
            noticed.append(group)
    assert noticed == list(range(model.groups))
    assert consumer.run(asking.reset_within_a_second)
    settled(producer, consumer)


@pytest.mark.full
@pytest.mark.timeout(3600)  # SmolLM2 without AMX: 28,500 tokens in bf16, twice
def test_long_prompts_by_the_dozen(engines):
    """Six there, six back."""
    model, *hosts = engines
    prompts = [tokens(f"{model.name} long {i}", 1000 + 250 * i) for i in range(12)]
    hand_over(model, *hosts, prompts[::2])
    hand_over(model, *reversed(hosts), prompts[1::2])


def test_the_logs_say_once_how_blocks_are_read(engines):
    _, producer, consumer = engines
    for host in (producer, consumer):
        assert host.log.read_text().count(" can be read: ") <= 1
    assert " can be read: " in consumer.log.read_text()
