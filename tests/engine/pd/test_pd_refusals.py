"""Engines that do not fit, and reads that fail where that is to be an error."""

import json
import os
import re
import signal

import pytest

from tests.engine import asking
from tests.engine.asking import assert_close
from tests.engine.pd import faults, handing
from tests.engine.pd.hosts import Engines, ours, peers
from tests.engine.prompts import tokens
from tests.engine.version import is_019
from tests.ports import free_port

NOISE = 0.02


def test_engines_of_other_weights_refuse_each_other_and_compute(tiny_engines: Engines):
    """Both values, once in the log, in the metrics and in `kvplugin peers`."""
    port = free_port()
    producer, consumer = tiny_engines.start_all(
        {"config": ours("producer", weight_epoch=1, kv_lease_duration=5.0)},
        {"config": ours("consumer", port, weight_epoch=2)},
    )
    prompts = [tokens(f"refused {i}", 300) for i in range(3)]
    expected = consumer.run(asking.ask, prompts)
    assert consumer.run(asking.reset_within_a_second)
    params = producer.run(handing.prefill, prompts)
    answers = consumer.run(handing.decode, prompts, params)
    for answer, other in zip(answers, expected, strict=True):
        assert answer.finish_reason == "length"
        assert_close(other, answer, NOISE)
    metrics = consumer.run(asking.metrics)
    assert metrics["vllm:kvplugin_nixl_refused_peers"] == 1
    assert metrics["vllm:kvplugin_nixl_missed_reads"] == len(prompts)
    assert metrics.get("vllm:kvplugin_nixl_reads", 0) == 0
    asked = peers(f"127.0.0.1:{port}", "--json")
    assert asked.returncode == 1
    (state,) = json.loads(asked.stdout)["peers"].values()
    assert re.match("refused.*weight_epoch: 2 here, 1 there", state)
    assert consumer.log.read_text().count("weight_epoch: 2 here, 1 there") == 1
    for host in (producer, consumer):
        assert not any(host.run(handing.settle).values())
        host.close()


@pytest.mark.skipif(is_019(), reason="tests/vllm019 has it")
@pytest.mark.full
def test_a_read_that_fails_is_an_error_where_that_is_the_policy(tiny_engines: Engines):
    """`kv_load_failure_policy: fail`, vLLM's own default."""
    producer, consumer = tiny_engines.start_all(
        {"config": ours("producer")},
        {
            "config": ours("consumer") | {"kv_load_failure_policy": "fail"},
            "steps": False,
            "prepare": faults.reads_can_be_watched,
        },
    )
    prompt = tokens("fails", 700)
    expected = consumer.run(asking.ask_one, prompt)
    assert consumer.run(asking.reset)
    (params,) = producer.run(handing.prefill, [prompt])
    consumer.run(faults.hold_reads, True)
    assert consumer.run(faults.begin, prompt, params, "WAITING_FOR_REMOTE_KVS")
    os.kill(producer.pid, signal.SIGKILL)
    answer = consumer.run(faults.finish)
    assert answer.finish_reason == "error"
    assert not answer.tokens
    assert not any(consumer.run(handing.settle).values())
    # What failed is nobody's hit.
    again = consumer.run(asking.ask_one, prompt)
    assert again.cached_tokens == 0
    assert_close(expected, again, NOISE)
    consumer.close()
