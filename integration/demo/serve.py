"""`demo serve`: vLLM's own OpenAI server with kvplugin's offload turned on."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

from kvplugin.errors import ConfigError, KVPluginError
from kvplugin.integration.demo.environment import ENVIRONMENT
from kvplugin.integration.demo.model import MODEL_NAME
from kvplugin.integration.vllm.render import offload_transfer_config

HOST: Final = "127.0.0.1"
KV_CACHE_BYTES: Final = 512 << 20
"""vLLM's own KV cache: some 23,000 tokens."""
CPU_BYTES: Final = 2 << 30
"""Host memory for kvplugin: some 93,000 tokens."""
STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP)
POLL_S: Final = 0.5
STOP_WAIT_S: Final = 20.0


def check_port(port: int) -> None:
    """Find out before the model loads whether the server could listen.

    Raises:
        ConfigError: something listens there already, or the port is not ours to use.
    """
    with socket.socket() as probe:
        # As the server does: a port whose last connections linger is not busy.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise ConfigError(
                f"port {port} of {HOST} cannot be used ({error.strerror}): "
                "choose another with --port"
            ) from error


def command(model: Path, port: int) -> list[str]:
    """The command line of the server."""
    options = {
        "--model": str(model),
        "--served-model-name": MODEL_NAME,
        "--host": HOST,
        "--port": str(port),
        "--kv-cache-memory-bytes": str(KV_CACHE_BYTES),
        "--kv-transfer-config": json.dumps(
            offload_transfer_config({"cpu_bytes_to_use": CPU_BYTES})
        ),
        # The probes of `_wait_until_healthy` are no news.
        "--disable-access-log-for-endpoints": "/health",
    }
    words = [word for option in options.items() for word in option]
    module = "vllm.entrypoints.openai.api_server"
    return [sys.executable, "-m", module, "--enforce-eager", *words]


def curl_line(port: int) -> str:
    """A request to the server, as one types it in a shell; it answers ` Paris.`"""
    body = {
        "model": MODEL_NAME,
        "prompt": "The capital of France is",
        "max_tokens": 8,
        "temperature": 0,
        "stop": "\n",
    }
    return (
        f"curl -s http://{HOST}:{port}/v1/completions "
        f"-H 'Content-Type: application/json' -d '{json.dumps(body)}'"
    )


def serve(model: Path, port: int, ready: Callable[[str], None]) -> int:
    """Run the server until Ctrl-C, SIGTERM, or its own end.

    Args:
        model: the prepared SmolLM2.
        port: TCP port on the loopback interface.
        ready: is called once the server answers, with a curl line to try.

    Returns:
        The server's exit status; 0 if it was stopped on request.

    Raises:
        ConfigError: the port cannot be used.
        KVPluginError: the server ended before it was ready.
    """
    check_port(port)
    with _server(command(model, port)) as process:
        try:
            _wait_until_healthy(process, port)
            ready(curl_line(port))
            return process.wait()
        except KeyboardInterrupt:
            return 0


@contextmanager
def _server(words: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """The server's process; it is gone when the block is left."""
    # A session of its own: Ctrl-C reaches this process only, which passes one signal
    # on. (vLLM's processes would all get it, and a second one interrupts their end.)
    process = subprocess.Popen(
        words, env={**os.environ, **ENVIRONMENT}, start_new_session=True
    )
    # The terminal and service managers say "stop" in other words; they mean the same.
    before = {word: signal.signal(word, _interrupt) for word in STOP_SIGNALS}
    try:
        yield process
    finally:
        for word, handler in before.items():
            signal.signal(word, handler)
        _stop(process)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask the server to end as Ctrl-C would; kill it and its children if it stays."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_WAIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_until_healthy(process: subprocess.Popen[bytes], port: int) -> None:
    while process.poll() is None:
        if _healthy(port):
            return
        time.sleep(POLL_S)
    raise KVPluginError(
        f"vLLM's server ended with status {process.returncode} before it was ready; "
        "its log above says why"
    )


def _healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False
