"""Prefill and decode in different engines, where vLLM 0.19.1 is different.

What means the same there is in `tests/engine/pd`, which `make test-vllm-019` runs, too.
"""

from pathlib import Path
from typing import NamedTuple

import pytest

from kvplugin.integration.vllm.policy_config import SCHEDULER_CLASS
from tests.engine import asking
from tests.engine.asking import Answer, assert_close, assert_same
from tests.engine.host import EngineHost, EngineStartError, offload
from tests.engine.hybrids import GEMMA
from tests.engine.pd import faults, handing
from tests.engine.pd.conftest import StartEngines
from tests.engine.pd.hosts import Engines, ours, several
from tests.engine.prompts import tokens
from tests.engine.test_hybrid import differ

SMALL, LARGE, WINDOW = 64, 128, 256
"""Tokens of the producer's blocks, of the consumer's, and of a window."""
BLOCKS = 400
"""Of the producer."""


@pytest.fixture(scope="module")
def engines(start_engines: StartEngines, gemma: Path) -> Engines:
    """With a model of six groups, five of which have windows."""
    return start_engines(
        model=str(gemma), skip_tokenizer_init=True, kv_cache_memory_bytes=64 << 20
    )


class Pair(NamedTuple):
    producer: EngineHost
    """With vLLM's own scheduler."""
    consumer: EngineHost
    """With ours."""

    def alone(self, prompts: list[list[int]]) -> list[Answer]:
        """What the consumer answers by itself, and has forgotten after."""
        answers = self.consumer.run(asking.ask, prompts)
        assert self.consumer.run(asking.reset_within_a_second)
        return answers

    def together(self, prompts: list[list[int]]) -> list[Answer]:
        params = self.producer.run(handing.prefill, prompts)
        return self.consumer.run(handing.decode, prompts, params)

    def settled(self) -> None:
        for host in self:
            assert not any(host.run(handing.settle).values())

    def counted(self, name: str) -> float:
        """By the consumer."""
        metrics = self.consumer.run(asking.metrics)
        return metrics.get(f"vllm:kvplugin_nixl_{name}", 0.0)


@pytest.fixture(scope="module")
def pair(engines: Engines) -> Pair:
    return Pair(
        *engines.start_all(
            {
                "config": ours("producer", kv_lease_duration=120.0),
                "block_size": SMALL,
                "kv_cache_memory_bytes": BLOCKS << 14,
            },
            {
                "config": ours("consumer"),
                "block_size": LARGE,
                "scheduler_cls": SCHEDULER_CLASS,
                "steps": False,
                "prepare": faults.reads_can_be_watched,
            },
        )
    )


def prompts_of(seed: str, *lengths: int) -> list[list[int]]:
    return [tokens(f"pd 0.19 {seed} {length}", length) for length in lengths]


def test_windows_are_not_read_with_vllms_scheduler(engines):
    """It would serve what a read that failed has left."""
    with pytest.raises(EngineStartError, match="KVPluginScheduler"):
        engines.start(ours("consumer"))


def test_the_text_is_that_of_one_engine(pair):
    prompts = prompts_of("text", 127, 128, 129, 256, 257, 700)
    expected = pair.alone(prompts)
    before = pair.counted("reads")
    for answer, other in zip(pair.together(prompts), expected, strict=True):
        assert_close(other, answer, GEMMA.noise)
    assert pair.counted("reads") == before + len(prompts)
    pair.settled()


def test_wrong_bytes_of_any_group_would_have_been_noticed(pair):
    """In one of several answers: most are certain, whatever one layer says."""
    prompts = prompts_of("zeroed", *range(600, 608))
    expected = pair.alone(prompts)
    noticed = []
    for group in range(GEMMA.groups):
        pair.consumer.run(faults.zero_group, group)
        answers = pair.together(prompts)
        pair.consumer.run(faults.zero_group, None)
        assert pair.consumer.run(asking.reset_within_a_second)
        pairs = zip(expected, answers, strict=True)
        if any(differ(right, wrong, GEMMA.noise) for right, wrong in pairs):
            noticed.append(group)
    assert noticed == list(range(GEMMA.groups))
    pair.settled()


def test_where_vllm_has_freed_a_windows_first_block_the_prompt_is_computed(pair):
    """It frees what the token behind the answer's first one does not read; the decoder
    goes on two tokens before that one."""
    end = WINDOW + 7 * SMALL
    prompts = prompts_of("freed", *range(end - 4, end + 2))
    expected = pair.alone(prompts)
    read = []
    for prompt, other in zip(prompts, expected, strict=True):
        before = pair.counted("reads")
        (answer,) = pair.together([prompt])
        assert_close(other, answer, GEMMA.noise)
        read.append(pair.counted("reads") > before)
    assert read == [True, True, False, False, True, True]
    pair.settled()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_read_that_fails_leaves_nothing(pair, policy):
    (prompt,) = prompts_of(f"fails {policy}", 700)
    (expected,) = pair.alone([prompt])
    (params,) = pair.producer.run(handing.prefill, [prompt])
    pair.consumer.run(faults.hold_reads, True)
    assert pair.consumer.run(faults.begin, prompt, params, "WAITING_FOR_REMOTE_KVS")
    pair.producer.run(handing.end_leases)
    assert not any(pair.producer.run(handing.settle).values())
    pair.consumer.run(asking.set_failure_policy, policy)
    before = pair.counted("discarded_reads")
    answer = pair.consumer.run(faults.finish)
    pair.consumer.run(asking.set_failure_policy, "recompute")
    if policy == "fail":
        assert answer.finish_reason == "error"
    else:
        assert_close(expected, answer, GEMMA.noise)
    (again,) = pair.alone([prompt])
    assert_close(expected, again, GEMMA.noise)
    assert pair.counted("discarded_reads") == before + 1
    pair.settled()


def test_an_idle_producer_gives_its_blocks_to_the_next_request(pair):
    """It is not stepped before that, though all has been read."""
    prompts = prompts_of("idle", *range(710, 718))
    pair.together(prompts)
    held = pair.producer.run(handing.held_by)
    assert (held["leases"], held["requests"]) == (0, len(prompts))
    (large,) = prompts_of("large", 4000)
    blocks = GEMMA.groups * -(-len(large) // SMALL)
    assert held["blocks"] > BLOCKS - blocks, "it would fit without them"
    assert not pair.producer.run(asking.reset)
    answer = pair.producer.run(asking.ask_one, large)
    assert_close(pair.consumer.run(asking.ask_one, large), answer, GEMMA.noise)
    assert not any(pair.producer.run(handing.held_by).values())
    assert pair.producer.run(asking.reset)


@pytest.mark.full
def test_nothing_is_read_inside_a_multi_connector(start_engines, llama):
    """It hands its block pool to none of its connectors."""
    engines = start_engines(
        model=str(llama),
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=64 << 20,
        disable_hybrid_kv_cache_manager=True,
    )
    producer, consumer = engines.start_all(
        *(
            {"config": several(ours(role, kv_lease_duration=120.0), offload(64 << 20))}
            for role in ("producer", "consumer")
        )
    )
    prompts = prompts_of("multi", 300, 700)
    expected = consumer.run(asking.ask, prompts)
    assert consumer.run(asking.reset_within_a_second)
    params = producer.run(handing.prefill, prompts)
    assert all(one["do_remote_prefill"] for one in params)
    answers = consumer.run(handing.decode, prompts, params)
    for answer, other in zip(answers, expected, strict=True):
        assert_same(other, answer)
    assert consumer.log.read_text().count("nothing is read: the engine") == 1
    for host in (producer, consumer):
        assert not any(host.run(handing.settle).values())
