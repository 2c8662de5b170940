"""Ways to start, ways to refuse, and starting without doing anything."""

import os
import re
import socket
from collections.abc import Iterator

import pytest

from tests.engine import asking
from tests.engine.asking import assert_same
from tests.engine.host import EngineHost, EngineStartError
from tests.engine.pd import handing
from tests.engine.pd.hosts import Engines, ours
from tests.engine.prompts import tokens

PROMPT = tokens("pd start", 300)
AWAY = {
    "do_remote_prefill": True,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "somebody",
    "remote_request_id": "something",
    "remote_host": "127.0.0.1",
    "remote_port": 1,
}


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port that somebody else listens on."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


def idles(engine: EngineHost) -> None:
    """Right answers, whatever the clients ask for, and nothing to hand over."""
    expected = engine.run(asking.ask_one, PROMPT)
    assert engine.run(asking.reset)
    ((answer, told),) = engine.run(handing.ask_with, [PROMPT], [AWAY])
    assert_same(expected, answer)
    assert told is None
    assert engine.run(handing.prefill, [PROMPT]) == []
    assert not any(engine.run(handing.settle).values())


def test_the_environment_can_switch_it_off(tiny_engines: Engines):
    config = ours("both") | {
        "kv_connector_extra_config": {"a_key_of": "another version"}
    }
    engine = tiny_engines.start(config, environment={"KVPLUGIN_DISABLE": "1"})
    idles(engine)
    assert "KVPLUGIN_DISABLE is set" in engine.log.read_text()
    engine.close()


@pytest.mark.full
def test_a_port_that_is_taken_ends_the_start_by_its_key(tiny_engines, taken_port):
    with pytest.raises(EngineStartError, match=re.escape(str(taken_port))) as error:
        tiny_engines.start(ours("producer", taken_port))
    assert "side_channel_port" in str(error.value)


@pytest.mark.full
def test_on_start_error_disable_runs_without(tiny_engines, taken_port):
    engine = tiny_engines.start(ours("both", taken_port, on_start_error="disable"))
    idles(engine)
    assert "did not start" in engine.log.read_text()
    engine.close()


@pytest.mark.full
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"side_chanel_port": 1}, "Did you mean 'side_channel_port'"),
        ({"side_channel_host": "0.0.0.0"}, "secret"),  # noqa: S104
    ],
)
def test_a_wrong_setting_ends_the_start_with_a_message(tiny_engines, settings, message):
    config = ours("producer") | {"kv_connector_extra_config": settings}
    with pytest.raises(EngineStartError, match=re.escape(message)):
        tiny_engines.start(config)


@pytest.mark.full
def test_a_module_path_works_where_plugins_are_not_allowed(tiny_engines: Engines):
    path = {"kv_connector_module_path": "kvplugin.integration.vllm.nixl"}
    both = tiny_engines.start_all(
        *(
            {
                "config": ours(role, kv_lease_duration=120.0) | path,
                "environment": {"VLLM_PLUGINS": ""},
            }
            for role in ("producer", "consumer")
        )
    )
    hands_over(*both)


@pytest.mark.full
def test_in_processes_of_their_own_scheduler_and_worker_find_each_other(
    tiny_engines: Engines,
):
    both = tiny_engines.start_all(
        *(
            {
                "config": ours(role, kv_lease_duration=120.0),
                "steps": False,
                "environment": {
                    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
                    "VLLM_CPU_OMP_THREADS_BIND": str(core % (os.cpu_count() or 1)),
                },
            }
            for core, role in enumerate(("producer", "consumer"))
        )
    )
    hands_over(*both)


def hands_over(producer: EngineHost, consumer: EngineHost) -> None:
    expected = consumer.run(asking.ask_one, PROMPT)
    assert consumer.run(asking.reset_within_a_second)
    params = producer.run(handing.prefill, [PROMPT])
    (answer,) = consumer.run(handing.decode, [PROMPT], params)
    asking.assert_close(expected, answer, 0.02)
    assert consumer.run(asking.metrics)["vllm:kvplugin_nixl_reads"] == 1
    for host in (producer, consumer):
        host.close()
