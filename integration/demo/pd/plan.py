"""Which programs make up a prefill/decode deployment on this machine."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import which
from typing import Any, Final, NamedTuple

from kvplugin.errors import ConfigError
from kvplugin.integration.demo.model import MODEL_NAME
from kvplugin.integration.demo.processes import (
    HOST,
    Program,
    check_port,
    free_ports,
)
from kvplugin.integration.vllm.render import nixl_transfer_config

OURS: Final = "KVPluginNixlConnector"
THEIRS: Final = "NixlConnector"
CONNECTORS: Final = (OURS, THEIRS)
MAX_TOKENS: Final = 4608
"""Longest prompt with its answer."""
KV_CACHE_BYTES: Final = 768 << 20
"""Of each server: some 16,000 tokens of SmolLM2 in fp32."""
LOWEST_BLOCK: Final = 32
"""vLLM's blocks on a CPU are multiples of this."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What the user may choose.

    The model computes in fp32 by default: where two words are equally likely in bf16,
    an engine's answer depends on how it batches, and the two texts of one question
    could not be compared.
    """

    model: Path
    out: Path
    connector: str = OURS
    prefill_block: int = 64
    decode_block: int = 128
    dtype: str = "float32"
    port: int = 0
    """Of the router; 0 is any free one."""

    def __post_init__(self) -> None:
        """Refuse block sizes that vLLM's CPU attention does not have."""
        for key in ("prefill_block", "decode_block"):
            size = getattr(self, key)
            if size < LOWEST_BLOCK or size % LOWEST_BLOCK:
                raise ConfigError(
                    f"--{key.replace('_', '-')} {size}: vLLM's block sizes on a CPU "
                    f"are multiples of {LOWEST_BLOCK}"
                )


class Deployment(NamedTuple):
    """Three programs and their ports."""

    prefill: Program
    decode: Program
    router: Program


def deployment(setup: Setup) -> Deployment:
    """The programs, with ports that are free now.

    Raises:
        ConfigError: the router's port is taken, or its program is not installed.
    """
    if setup.port:
        check_port(setup.port)
    program = _router_program()
    ports = free_ports(6)
    cores = halves(sorted(os.sched_getaffinity(0)))
    prefill, decode = (
        _engine(setup, role, block, ports.pop(), ports.pop(), bound)
        for role, block, bound in (
            ("producer", setup.prefill_block, cores[0]),
            ("consumer", setup.decode_block, cores[1]),
        )
    )
    port = setup.port or ports.pop()
    router = Program(
        "vllm-router",
        router_words(program, port, ports.pop(), prefill, decode),
        port,
        setup.out / "router.log",
    )
    return Deployment(prefill, decode, router)


def halves(cores: Sequence[int]) -> tuple[str, str]:
    """For `VLLM_CPU_OMP_THREADS_BIND`: cores of the one server and of the other.

    With one core both have it.
    """
    middle = len(cores) // 2
    first, second = cores[:middle] or cores, cores[middle:]
    return ",".join(map(str, first)), ",".join(map(str, second))


def _engine(
    setup: Setup, role: str, block: int, port: int, channel: int, cores: str
) -> Program:
    name = {"producer": "prefill", "consumer": "decode"}[role]
    options = {
        "--model": str(setup.model),
        "--served-model-name": MODEL_NAME,
        "--host": HOST,
        "--port": str(port),
        "--dtype": setup.dtype,
        "--block-size": str(block),
        "--max-model-len": str(MAX_TOKENS),
        "--kv-cache-memory-bytes": str(KV_CACHE_BYTES),
        "--kv-transfer-config": json.dumps(_transfer_config(setup, role)),
        "--disable-access-log-for-endpoints": "/health,/metrics",
    }
    module = "vllm.entrypoints.openai.api_server"
    return Program(
        f"the {name} server",
        [sys.executable, "-m", module, "--enforce-eager", *_words(options)],
        port,
        setup.out / f"{name}.log",
        {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(channel),
            "VLLM_CPU_OMP_THREADS_BIND": cores,
        },
    )


def _transfer_config(setup: Setup, role: str) -> dict[str, Any]:
    # A read that fails is seen as one: the table says whose prompt was not read.
    if setup.connector == OURS:
        return nixl_transfer_config(role, {}, "recompute")
    return {
        "kv_connector": setup.connector,
        "kv_role": f"kv_{role}",
        "kv_load_failure_policy": "recompute",
    }


def _words(options: dict[str, str]) -> list[str]:
    return [word for option in options.items() for word in option]


def _router_program() -> str:
    """vLLM's router, installed beside this Python or on the PATH.

    Raises:
        ConfigError: it is in neither place.
    """
    beside = Path(sys.executable).with_name("vllm-router")
    found = str(beside) if beside.exists() else which("vllm-router")
    if found is None:
        raise ConfigError("vllm-router is not installed: pip install 'kvplugin[demo]'")
    return found


def router_words(
    program: str, port: int, metrics_port: int, prefill: Program, decode: Program
) -> list[str]:
    """The command line of vLLM's router for one server of each kind."""
    options = {
        "--kv-connector": "nixl",
        "--host": HOST,
        "--port": str(port),
        "--prometheus-port": str(metrics_port),
        "--prefill": prefill.url,
        "--decode": decode.url,
        "--worker-startup-check-interval": "1",
    }
    return [program, "--vllm-pd-disaggregation", *_words(options)]
