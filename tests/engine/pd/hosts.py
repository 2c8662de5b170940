"""Engines that hand prompts over to each other, each in a process of its own."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kvplugin.integration.vllm.render import nixl_transfer_config
from tests.engine import asking
from tests.engine.host import EngineHost
from tests.ports import free_port


def ours(role: str, port: int | None = None, **settings: Any) -> dict[str, Any]:
    """`kv_transfer_config` of our connector, as `kvplugin config` renders it."""
    return nixl_transfer_config(
        role, {"side_channel_port": port or free_port(), **settings}
    )


def stock(role: str, **settings: Any) -> dict[str, Any]:
    """The same of vLLM's own NixlConnector, which takes its port from the
    environment."""
    return {
        "kv_connector": "NixlConnector",
        "kv_role": f"kv_{role}",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": settings,
    }


def several(*connectors: dict[str, Any]) -> dict[str, Any]:
    """`kv_transfer_config` of a `MultiConnector`."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": list(connectors)},
    }


def peers(address: str, *options: str) -> "subprocess.CompletedProcess[str]":
    """What `kvplugin peers` says of the engine there."""
    command = Path(sys.executable).parent / "kvplugin"
    return subprocess.run(
        [command, "peers", address, *options],
        capture_output=True,
        text=True,
        check=False,
    )


def counted(host: EngineHost, name: str) -> float:
    """A metric of our connector (`kvplugin.connectors.nixl.metrics`) by its name."""
    return host.run(asking.metrics).get(f"vllm:kvplugin_nixl_{name}", 0.0)


class Engines:
    """Starts engines, and ends them all when it is closed.

    Args:
        folder: where their logs go.
        defaults: arguments of `EngineHost` that all of them have.
    """

    def __init__(self, folder: Path, **defaults: Any) -> None:
        self._folder = folder
        self._defaults = defaults
        self._hosts: list[EngineHost] = []
        self._numbers = itertools.count()

    def start(self, config: dict[str, Any] | None, **arguments: Any) -> EngineHost:
        """An engine that goes on by itself.

        Args:
            config: its `kv_transfer_config`; None for no connector.
            arguments: of `EngineHost`, over the defaults.
        """
        connector = {} if config is None else {"kv_transfer_config": config}
        log = self._folder / f"engine-{next(self._numbers)}.txt"
        host = EngineHost(
            log, **{"steps": True, **self._defaults, **connector, **arguments}
        )
        self._hosts.append(host)
        return host

    def start_all(self, *starts: dict[str, Any]) -> list[EngineHost]:
        """Several at once; arguments of `start` for each.

        Raises:
            EngineStartError: one did not start.
        """
        with ThreadPoolExecutor(len(starts)) as pool:
            return [
                future.result()
                for future in [pool.submit(self.start, **start) for start in starts]
            ]

    def close(self) -> None:
        """End all of them, stopped ones too."""
        for host in self._hosts:
            with contextlib.suppress(ProcessLookupError):
                os.kill(host.pid, signal.SIGCONT)
        with ThreadPoolExecutor(max(1, len(self._hosts))) as pool:
            list(pool.map(EngineHost.close, self._hosts))
