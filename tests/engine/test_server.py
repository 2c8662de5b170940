"""vLLM's OpenAI server, with the connector on, over HTTP."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvplugin.integration.demo.model import MODEL_NAME
from kvplugin.integration.demo.processes import STOP_WAIT_S

HOST = "127.0.0.1"
PROMPT = "The notebook says that the gauge at the weir was read again. " * 60


class Server:
    """`demo serve` on a free port."""

    def __init__(self, log: Path) -> None:
        with socket.create_server((HOST, 0)) as listener:
            self.port = listener.getsockname()[1]
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [*_COMMAND, "--port", str(self.port)],
                # The development mode of vLLM's server can reset the cache.
                env={**os.environ, "VLLM_SERVER_DEV_MODE": "1"},
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        assert self._process.stdout is not None
        if not any("curl" in line for line in self._process.stdout):
            pytest.fail(f"the server did not start:\n{log.read_text()[-3000:]}")

    def call(self, path: str, body: object = None) -> str:
        """The reply's body; POST if there is something to send."""
        request = urllib.request.Request(
            f"http://{HOST}:{self.port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            return str(reply.read().decode())

    def complete(self) -> str:
        """The server's greedy continuation of `PROMPT`."""
        body = {
            "model": MODEL_NAME,
            "prompt": PROMPT,
            "max_tokens": 8,
            "temperature": 0,
        }
        return str(json.loads(self.call("/v1/completions", body))["choices"][0]["text"])

    def metric(self, name: str) -> float:
        """The value of a metric without labels of its own."""
        found = re.search(rf"^{name}{{.*}} (\S+)$", self.call("/metrics"), re.MULTILINE)
        assert found is not None, f"{name} is not on /metrics"
        return float(found[1])

    def stop(self) -> int:
        """End it as Ctrl-C does; the exit status."""
        self._process.send_signal(signal.SIGINT)
        self._process.communicate(timeout=10 * STOP_WAIT_S)
        return self._process.returncode


_COMMAND = [sys.executable, "-m", "kvplugin.integration.demo", "serve"]


@pytest.fixture
def server(tmp_path: Path, smollm2: Path) -> Iterator[Server]:
    del smollm2  # prepared before the server's time begins
    server = Server(tmp_path / "server.log")
    yield server
    assert server.stop() == 0


def test_a_prompt_comes_back_from_host_memory_and_metrics_say_so(server):
    first = server.complete()
    deadline = time.monotonic() + 10
    # The reset is refused until the engine has noticed that its stores ended.
    while server.metric("vllm:kvplugin_offload_pending_jobs"):
        assert time.monotonic() < deadline
    server.call("/reset_prefix_cache", {})
    second = server.complete()

    assert second == first
    assert server.metric("vllm:kvplugin_offload_loaded_tokens_total") >= 128
    assert server.metric("vllm:external_prefix_cache_hits_total") >= 128
    assert server.metric("vllm:kvplugin_offload_load_seconds_sum") > 0
    assert server.metric("vllm:kvplugin_offload_failed_loads_total") == 0
