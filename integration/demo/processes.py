"""Programs that the demo starts, waits for, and ends in every case."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Final

from kvplugin.errors import ConfigError, KVPluginError
from kvplugin.integration.demo.environment import ENVIRONMENT

HOST: Final = "127.0.0.1"
STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP)
POLL_S: Final = 0.5
HEALTH_WAIT_S: Final = 5.0
STOP_WAIT_S: Final = 20.0
LOG_TAIL_LINES: Final = 25
_SERVERS: Final = range(10_000, 32_768)
"""Ports below Linux's range for connections (``ip_local_port_range``)."""
_RANDOM: Final = random.SystemRandom()


@dataclass(frozen=True)
class Program:
    """A server to start.

    `log` is the file for all that it prints, overwritten; None leaves it on the
    terminal. It is ready when GET `health` on `port` is answered with status 200.
    """

    name: str
    words: Sequence[str]
    port: int
    log: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    health: str = "/health"

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://{HOST}:{self.port}"


class Running:
    """A program's processes."""

    def __init__(self, program: Program) -> None:
        self.program = program
        with ExitStack() as stack:
            log: IO[bytes] | None = None
            if program.log is not None:
                log = stack.enter_context(program.log.open("wb"))
            # A session of its own: Ctrl-C reaches this process only, which passes one
            # signal on. (All of vLLM's processes would get it, and a second one
            # interrupts their end.)
            try:
                self.process = subprocess.Popen(
                    program.words,
                    env={**os.environ, **ENVIRONMENT, **program.environment},
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            except OSError as error:
                raise KVPluginError(
                    f"{program.name} cannot be started: {error}"
                ) from error

    def check(self, doing: str = "") -> None:
        """Raise if it has ended.

        Raises:
            KVPluginError: with the status and the end of its log.
        """
        if self.process.poll() is not None:
            raise KVPluginError(
                f"{self.program.name} ended with status {self.process.returncode}"
                f"{doing}; {self.last_words()}"
            )

    def last_words(self) -> str:
        """The end of its log, for an error message."""
        log = self.program.log
        if log is None:
            return "its log above says why"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        return f"the end of {log}:\n" + "\n".join(lines[-LOG_TAIL_LINES:])

    @property
    def healthy(self) -> bool:
        """Whether it answers."""
        port, health = self.program.port, self.program.health
        try:
            with urllib.request.urlopen(
                f"http://{HOST}:{port}{health}", timeout=HEALTH_WAIT_S
            ) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False

    def ask_to_end(self) -> None:
        """As Ctrl-C would."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)

    def wait(self, deadline: float) -> None:
        """Until it has ended, or until `deadline`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, deadline - time.monotonic()))

    def kill(self) -> None:
        """It and its children, those that outlived it included."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def running(programs: Sequence[Program]) -> Iterator[list[Running]]:
    """Start programs; they are gone when the block is left, however it is left."""
    # The terminal and service managers say "stop" in other words; they mean the same.
    before = {word: signal.signal(word, _interrupt) for word in STOP_SIGNALS}
    started: list[Running] = []
    try:
        for program in programs:
            started.append(Running(program))
        yield started
    finally:
        try:
            _end(started)
        finally:
            for word, handler in before.items():
                signal.signal(word, handler)


def _end(started: Sequence[Running]) -> None:
    """Ask all to end, and kill what has not after a while, or at a second Ctrl-C."""
    try:
        for one in started:
            one.ask_to_end()
        deadline = time.monotonic() + STOP_WAIT_S
        for one in started:
            one.wait(deadline)
    finally:
        for one in started:
            one.kill()


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def wait_until_ready(
    started: Sequence[Running],
    limit_s: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return once all programs answer.

    Args:
        started: the programs.
        limit_s: how long that may take.
        clock: tells the seconds.
        sleep: passes them.

    Raises:
        KVPluginError: one has ended, or does not answer in time; the message has the
            end of its log.
    """
    deadline = clock() + limit_s
    waiting = list(started)
    while waiting:
        for one in started:
            one.check(" before it was ready")
        waiting = [one for one in waiting if not one.healthy]
        if waiting and clock() > deadline:
            first = waiting[0]
            raise KVPluginError(
                f"{first.program.name} does not answer on {first.program.url} after "
                f"{limit_s:.0f} s; {first.last_words()}"
            )
        if waiting:
            sleep(POLL_S)


def check_port(port: int, option: str = "--port") -> None:
    """Find out before a model loads whether a server could listen.

    Raises:
        ConfigError: something listens there already, or the port is not ours to use;
            the message names the option that says it.
    """
    with socket.socket() as probe:
        # As the server does: a port whose last connections linger is not busy.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise ConfigError(
                f"port {port} of {HOST} cannot be used ({error.strerror}): "
                f"choose another with {option}"
            ) from error


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, all different, and none that the system gives to
    whoever wants any: a server may take its own only a minute later."""
    found: list[int] = []
    for port in _RANDOM.sample(_SERVERS, len(_SERVERS)):
        if len(found) == count:
            break
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind((HOST, port))
            found.append(port)
    return found
