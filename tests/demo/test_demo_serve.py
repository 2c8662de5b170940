import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvplugin.errors import ConfigError
from kvplugin.integration.demo import __main__ as cli
from kvplugin.integration.demo.processes import HOST, check_port
from kvplugin.integration.demo.serve import command, curl_line


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.create_server((HOST, 0)) as listener:
        yield listener.getsockname()[1]


def test_a_busy_port_is_refused(busy_port: int) -> None:
    with pytest.raises(ConfigError, match=f"port {busy_port} .*--port"):
        check_port(busy_port)


def test_a_port_that_is_free_again_is_accepted(busy_port: int) -> None:
    with socket.create_connection((HOST, busy_port)):
        pass
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
    check_port(port)


def test_a_busy_port_is_found_before_the_model_is_prepared(
    busy_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        cli, "prepare_smollm2", lambda _: pytest.fail("the model was prepared")
    )
    result = CliRunner().invoke(cli.main, ["serve", "--port", str(busy_port)])
    assert isinstance(result.exception, ConfigError)


def test_curl_line_is_a_shell_command_with_a_json_body() -> None:
    words = shlex.split(curl_line(8123))
    assert words[0] == "curl"
    assert "http://127.0.0.1:8123/v1/completions" in words
    body = json.loads(words[words.index("-d") + 1])
    assert body["model"] == "SmolLM2-135M-Instruct"


def test_server_listens_on_the_loopback_with_the_connector() -> None:
    words = command(Path("/models/smol"), 8123)
    options = dict(zip(words[4::2], words[5::2], strict=True))
    assert options["--host"] == "127.0.0.1"
    assert options["--port"] == "8123"
    transfer = json.loads(options["--kv-transfer-config"])
    assert transfer["kv_connector"] == "KVPluginOffloadConnector"


@pytest.mark.engine
@pytest.mark.full
def test_serve_answers_its_own_curl_line_and_ends_on_ctrl_c(model_cache: Path) -> None:
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
    server = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "kvplugin.integration.demo",
            "serve",
            "--port",
            f"{port}",
        ],
        env={**os.environ, "KVPLUGIN_CACHE": str(model_cache)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        curl = next(line for line in server.stdout if line.startswith("curl"))
        answer = subprocess.run(shlex.split(curl), capture_output=True, check=True)
        assert json.loads(answer.stdout)["choices"][0]["text"] == " Paris."
    finally:
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=60)
    assert server.returncode == 0
    check_port(port)
