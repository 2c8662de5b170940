"""Which programs `demo pd` starts."""

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from kvplugin.errors import ConfigError
from kvplugin.integration.demo.pd import plan
from kvplugin.integration.demo.pd.plan import Setup, deployment
from kvplugin.integration.demo.processes import HOST, Program


def setup(**changes: Any) -> Setup:
    return Setup(model=Path("/models/smol"), out=Path("/out"), **changes)


def options(program: Program) -> dict[str, str]:
    words = [word for word in program.words if word != "--enforce-eager"]
    first = next(i for i, word in enumerate(words) if word.startswith("--"))
    return dict(zip(words[first::2], words[first + 1 :: 2], strict=True))


def test_each_engine_has_its_role_block_size_ports_and_cores() -> None:
    prefill, decode, router = deployment(setup(prefill_block=32, decode_block=64))
    roles = [
        json.loads(options(engine)["--kv-transfer-config"])
        for engine in (prefill, decode)
    ]
    assert [role["kv_role"] for role in roles] == ["kv_producer", "kv_consumer"]
    assert {role["kv_connector"] for role in roles} == {"KVPluginNixlConnector"}
    sizes = [options(engine)["--block-size"] for engine in (prefill, decode)]
    assert sizes == ["32", "64"]
    channels = [
        int(engine.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"])
        for engine in (prefill, decode)
    ]
    assert len({prefill.port, decode.port, router.port, *channels}) == 5
    cores = [
        {
            int(core)
            for core in engine.environment["VLLM_CPU_OMP_THREADS_BIND"].split(",")
        }
        for engine in (prefill, decode)
    ]
    ours = os.sched_getaffinity(0)
    assert cores[0] | cores[1] == ours
    assert len(ours) == 1 or not cores[0] & cores[1]


def test_everything_listens_on_the_loopback_only() -> None:
    prefill, decode, router = deployment(setup())
    assert {options(engine)["--host"] for engine in (prefill, decode)} == {HOST}
    assert {
        engine.environment["VLLM_NIXL_SIDE_CHANNEL_HOST"]
        for engine in (prefill, decode)
    } == {HOST}
    words = router.words
    assert words[words.index("--host") + 1] == HOST


def test_the_router_is_told_both_engines() -> None:
    prefill, decode, router = deployment(setup())
    words = list(router.words)
    assert "--vllm-pd-disaggregation" in words
    assert words[words.index("--prefill") + 1] == f"http://{HOST}:{prefill.port}"
    assert words[words.index("--decode") + 1] == f"http://{HOST}:{decode.port}"
    assert words[words.index("--port") + 1] == str(router.port)


def test_another_connector_is_named_without_keys_of_ours() -> None:
    prefill, _, _ = deployment(setup(connector="NixlConnector"))
    config = json.loads(options(prefill)["--kv-transfer-config"])
    assert config["kv_connector"] == "NixlConnector"
    assert "kv_connector_extra_config" not in config


@pytest.mark.parametrize("size", [0, 16, 48, -32])
def test_a_block_size_that_vllm_does_not_have_is_refused(size: int) -> None:
    with pytest.raises(ConfigError, match=r"--decode-block .* multiples of 32"):
        setup(decode_block=size)


def test_a_taken_port_is_refused() -> None:
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} .*--port"):
            deployment(setup(port=port))


def test_a_router_that_is_not_installed_is_said_to_be(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(plan.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"kvplugin\[demo\]"):
        deployment(setup())


@pytest.mark.parametrize(
    ("cores", "bound"),
    [
        ([5], ("5", "5")),
        ([0, 1], ("0", "1")),
        ([2, 3, 7], ("2", "3,7")),
        ([0, 1, 2, 3], ("0,1", "2,3")),
    ],
)
def test_cores_are_shared_out(cores: list[int], bound: tuple[str, str]) -> None:
    assert plan.halves(cores) == bound
