"""Two engines with blocks of different sizes; each hands over to the other.

Both are producer and consumer, so that one pair shows 64 -> 128 and 128 -> 64.
"""

import json
from typing import Any, NamedTuple

import pytest

from tests.engine import asking
from tests.engine.asking import Answer, assert_close
from tests.engine.host import EngineHost
from tests.engine.pd import faults, handing
from tests.engine.pd.hosts import Engines, counted, ours, peers
from tests.engine.prompts import tokens
from tests.ports import free_port

LEASE = 120.0
"""Seconds; much longer than anything here takes, so that blocks come back because their
readers are done with them."""
NOISE = 0.02
"""Log-probabilities differ by so much where a prefill is split differently."""


class Pair(NamedTuple):
    small: EngineHost
    """Blocks of 64."""
    large: EngineHost
    """Blocks of 128."""
    small_address: str

    def way(self, name: str) -> tuple[EngineHost, EngineHost]:
        """Producer and consumer."""
        both = (self.small, self.large)
        return both if name == "64 to 128" else both[::-1]


@pytest.fixture(scope="module")
def pair(tiny_engines: Engines) -> Pair:
    port = free_port()
    small, large = tiny_engines.start_all(
        {
            "config": ours("both", port, kv_lease_duration=LEASE),
            "block_size": 64,
            "prepare": faults.reads_can_be_watched,
        },
        {
            "config": ours("both", kv_lease_duration=LEASE),
            "block_size": 128,
            "prepare": faults.reads_can_be_watched,
        },
    )
    return Pair(small, large, f"127.0.0.1:{port}")


both_ways = pytest.mark.parametrize("way", ["64 to 128", "128 to 64"])


def prompts_of(seed: str, *lengths: int) -> list[list[int]]:
    return [tokens(f"pair {seed} {i}", n) for i, n in enumerate(lengths)]


def alone(engine: EngineHost, prompts: list[list[int]], count: int = 4) -> list[Answer]:
    """What the engine answers by itself, and has forgotten after."""
    answers = engine.run(asking.ask, prompts, count)
    assert engine.run(asking.reset_within_a_second)
    return answers


def assert_balanced(*hosts: EngineHost) -> None:
    for host in hosts:
        assert not any(host.run(handing.settle).values())


@both_ways
def test_the_text_is_that_of_one_engine(pair, way):
    producer, consumer = pair.way(way)
    prompts = prompts_of(way, 130, 300, 640, 1023, 1024, 1025)
    expected = alone(consumer, prompts)
    before = counted(consumer, "reads")
    params = producer.run(handing.prefill, prompts)
    answers = consumer.run(handing.decode, prompts, params)
    for answer, other in zip(answers, expected, strict=True):
        assert_close(other, answer, NOISE)
    assert counted(consumer, "reads") == before + len(prompts)
    assert_balanced(producer, consumer)


@both_ways
def test_wrong_bytes_would_have_been_noticed(pair, way):
    """The control: what was read is zeroed before anybody computes on it."""
    producer, consumer = pair.way(way)
    prompts = prompts_of(f"zero {way}", 300, 640)
    expected = alone(consumer, prompts)
    params = producer.run(handing.prefill, prompts)
    consumer.run(faults.zero_group, 0)
    answers = consumer.run(handing.decode, prompts, params)
    consumer.run(faults.zero_group, None)
    for answer, other in zip(answers, expected, strict=True):
        with pytest.raises(AssertionError):
            assert_close(other, answer, NOISE)
    assert_balanced(producer, consumer)
    assert consumer.run(asking.reset_within_a_second)


def test_what_was_read_is_a_local_hit_for_the_next_one(pair):
    prompt, other = prompts_of("shared", 1000, 1000)
    params = pair.small.run(handing.prefill, [prompt])
    pair.large.run(handing.decode, [prompt], params)
    longer = [*prompt, *other[:200]]
    answer = pair.large.run(asking.ask_one, longer)
    assert answer.cached_tokens == 7 * 128
    params = pair.small.run(handing.prefill, [longer])
    before = pair.large.run(asking.metrics)["vllm:kvplugin_nixl_read_tokens"]
    again = pair.large.run(handing.decode, [longer], params)
    assert_close(answer, again[0], NOISE)
    read = pair.large.run(asking.metrics)["vllm:kvplugin_nixl_read_tokens"] - before
    assert read < 500
    assert_balanced(pair.small, pair.large)


def test_fifty_requests_at_once(pair):
    prompts = prompts_of("many", *(100 + 11 * i for i in range(50)))
    expected = alone(pair.large, prompts)
    params = pair.small.run(handing.prefill, prompts)
    assert len({one["remote_request_id"] for one in params}) == 50
    before = counted(pair.large, "reads")
    answers = pair.large.run(handing.decode, prompts, params)
    for answer, other in zip(answers, expected, strict=True):
        assert_close(other, answer, NOISE)
    assert counted(pair.large, "reads") == before + 50
    assert_balanced(pair.small, pair.large)


def test_samples_of_one_prompt_share_what_was_handed_over(pair):
    (prompt,) = prompts_of("samples", 777)
    (expected,) = alone(pair.large, [prompt])
    best = expected.tokens[0]
    (params,) = pair.small.run(handing.prefill, [prompt])
    before = counted(pair.large, "reads")
    for candidates in pair.large.run(handing.samples, prompt, params, 3):
        assert abs(candidates[best] - expected.candidates[0][best]) < NOISE
    assert counted(pair.large, "reads") == before + 3
    assert_balanced(pair.small, pair.large)


def test_requests_of_several_clients_share_what_was_handed_over(pair):
    (prompt,) = prompts_of("clients", 777)
    (expected,) = alone(pair.large, [prompt])
    params = pair.small.run(handing.prefill, [prompt])
    before = counted(pair.large, "reads")
    answers = pair.large.run(handing.decode, [prompt] * 3, params * 3)
    for answer in answers:
        assert_close(expected, answer, NOISE)
    assert counted(pair.large, "reads") > before
    assert_balanced(pair.small, pair.large)


def test_what_was_handed_over_and_is_gone_is_computed(pair):
    (prompt,) = prompts_of("late", 500)
    (expected,) = alone(pair.large, [prompt])
    params = pair.small.run(handing.prefill, [prompt])
    pair.small.run(handing.end_leases)
    assert_balanced(pair.small)
    before = counted(pair.large, "reads")
    (answer,) = pair.large.run(handing.decode, [prompt], params)
    assert_close(expected, answer, NOISE)
    assert counted(pair.large, "reads") == before
    assert_balanced(pair.large)


def test_a_prompt_that_is_not_the_one_handed_over_is_computed(pair):
    one, other = prompts_of("other", 400, 400)
    (expected,) = alone(pair.large, [other])
    params = pair.small.run(handing.prefill, [one])
    before = counted(pair.large, "reads")
    (answer,) = pair.large.run(handing.decode, [other], params)
    assert_close(expected, answer, NOISE)
    assert counted(pair.large, "reads") == before
    assert_balanced(pair.small, pair.large)


HOSTILE: dict[str, Any] = {
    "no blocks": {"do_remote_prefill": True},
    "no host": {"remote_host": None},
    "no port": {"remote_port": None},
    "no engine": {"remote_engine_id": None},
    "an engine that is another": {"remote_engine_id": "somebody else"},
    "a lease that is none": {"remote_request_id": "0-1234"},
    "a port without anybody": {"remote_port": 1},
    "a host that is none": {"remote_host": "no such host.invalid"},
    "blocks that are text": {"remote_block_ids": "1, 2, 3"},
    "blocks out of range": {"remote_block_ids": [[10**9] * 3]},
    "more tokens than there are": {"remote_num_tokens": 10**9},
    "both ways": {"do_remote_decode": True},
    "a flag that is text": {"do_remote_prefill": "yes"},
    "another mode": {"transfer_mode": "push"},
    "numbers of ranks": {"tp_size": -1},
}


@pytest.mark.parametrize("wrong", HOSTILE)
def test_what_a_client_makes_up_ends_with_the_right_text(pair, wrong):
    (prompt,) = prompts_of("hostile", 260)
    expected = pair.large.run(asking.ask_one, prompt)
    (params,) = pair.small.run(handing.prefill, [prompt])
    if wrong == "no blocks":
        params = {}
    (answer,) = pair.large.run(handing.decode, [prompt], [params | HOSTILE[wrong]])
    assert answer.finish_reason == "length"
    assert_close(expected, answer, NOISE)
    for host in (pair.small, pair.large):
        host.run(handing.end_leases)
    assert_balanced(pair.small, pair.large)
    assert pair.large.run(asking.reset_within_a_second)


@pytest.mark.parametrize("status", ["WAITING", "WAITING_FOR_REMOTE_KVS", "RUNNING"])
def test_a_consumers_request_is_aborted(pair, status):
    (prompt,) = prompts_of(f"aborted {status}", 600)
    (params,) = pair.small.run(handing.prefill, [prompt])
    assert pair.large.run(faults.abort_when, prompt, params, status)
    assert_balanced(pair.small, pair.large)


def test_a_request_is_aborted_while_its_read_goes_on(pair):
    """Its blocks stay in use until the read has ended."""
    (prompt,) = prompts_of("aborted in its read", 600)
    (params,) = pair.small.run(handing.prefill, [prompt])
    assert pair.large.run(faults.abort_while_reading, prompt, params)
    assert_balanced(pair.small, pair.large)
    (again,) = pair.large.run(asking.ask, [prompt])
    assert again.cached_tokens == 0


def test_a_producers_request_is_aborted(pair):
    (prompt,) = prompts_of("aborted prefill", 600)
    params = dict(handing.HAND_OVER)
    assert pair.small.run(faults.abort_when, prompt, params, "RUNNING")
    assert_balanced(pair.small)


def test_how_it_is_can_be_asked(pair):
    (prompt,) = prompts_of("asked", 200)
    params = pair.large.run(handing.prefill, [prompt])
    pair.small.run(handing.decode, [prompt], params)
    done = peers(pair.small_address, "--json")
    assert done.returncode == 0
    health = json.loads(done.stdout)
    assert health["role"] == "both"
    assert health["peers"] == {f"127.0.0.1:{params[0]['remote_port']}": "ready"}
    table = peers(pair.small_address)
    assert f"engine               {health['engine_id']}" in table.stdout
