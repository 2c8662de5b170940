"""Two tensor-parallel ranks on one side or on both."""

import os

import pytest

from tests.engine import asking
from tests.engine.asking import assert_close
from tests.engine.pd import handing
from tests.engine.pd.hosts import Engines, ours
from tests.engine.prompts import tokens

NOISE = 0.02


@pytest.mark.full
@pytest.mark.parametrize(("first", "second"), [(2, 1), (1, 2), (2, 2)])
def test_heads_are_split_and_joined(tiny_engines: Engines, first, second):
    producer, consumer = tiny_engines.start_all(
        *(
            {
                "config": ours(role, kv_lease_duration=120.0),
                "block_size": size,
                "tensor_parallel_size": ranks,
                # Engines of several ranks have processes of their own.
                "steps": ranks == 1,
                "environment": {
                    "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(ranks > 1)),
                    "VLLM_CPU_OMP_THREADS_BIND": "0|1" if ranks > 1 else "0",
                }
                if (os.cpu_count() or 1) > 1
                else {},
            }
            for role, size, ranks in (
                ("producer", 64, first),
                ("consumer", 128, second),
            )
        )
    )
    prompts = [tokens(f"ranks {first} {second} {n}", n) for n in (130, 700, 1500)]
    expected = consumer.run(asking.ask, prompts)
    assert consumer.run(asking.reset_within_a_second)
    params = producer.run(handing.prefill, prompts)
    assert {one["tp_size"] for one in params} == {first}
    answers = consumer.run(handing.decode, prompts, params)
    for answer, other in zip(answers, expected, strict=True):
        assert_close(other, answer, NOISE)
    metrics = consumer.run(asking.metrics)
    assert metrics["vllm:kvplugin_nixl_reads"] == len(prompts)
    for host in (producer, consumer):
        host.close()
