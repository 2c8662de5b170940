"""`demo serve`: vLLM's own OpenAI server with kvplugin's offload turned on."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvplugin.integration.demo.model import MODEL_NAME
from kvplugin.integration.demo.processes import (
    HOST,
    Program,
    check_port,
    running,
    wait_until_ready,
)
from kvplugin.integration.vllm.render import offload_transfer_config

KV_CACHE_BYTES: Final = 512 << 20
"""vLLM's own KV cache: some 23,000 tokens."""
CPU_BYTES: Final = 2 << 30
"""Host memory for kvplugin: some 93,000 tokens."""
START_LIMIT_S: Final = 900.0
"""How long the server may take to answer."""


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
        # The probes of `wait_until_ready` are no news.
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
    with running([Program("vLLM's server", command(model, port), port)]) as (server,):
        try:
            wait_until_ready([server], START_LIMIT_S)
            ready(curl_line(port))
            return server.process.wait()
        except KeyboardInterrupt:
            return 0
