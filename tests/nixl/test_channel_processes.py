"""Peers in processes of their own: killed, stopped, and started again."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvplugin.connectors.nixl import wire
from tests.nixl.channel_lab import (
    Clock,
    ask,
    asking,
    eventually,
    open_lease,
    replies_to,
)
from tests.ports import free_port

_SERVER = """
import resource, signal, sys
from kvplugin.connectors.nixl.server import ChannelServer
from tests.nixl.channel_lab import SECRET, Answers
files = int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
port, answers = int(sys.argv[1]), Answers(sys.argv[2])
server = ChannelServer("127.0.0.1", port, answers, secret=SECRET)
print(server.address, flush=True)
signal.pause()
"""


@contextmanager
def _engine(
    port: int, engine_id: str, files: int = 1024
) -> Iterator[subprocess.Popen[str]]:
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER, str(port), engine_id, str(files)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == f"127.0.0.1:{port}"
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()


def test_a_peer_that_is_killed_and_another_engine_at_its_address() -> None:
    port = free_port()
    address = f"127.0.0.1:{port}"
    with asking() as client:
        with _engine(port, "old") as process:
            assert ask(client, address).answer == wire.Description(descriptor=b"old")
            client.keep(address, "lease", "reader", 0.05)
            process.kill()
            process.wait()
            reply = ask(client, address, timeout=1e6)
            assert reply.answer is None
            assert "nobody listens" in reply.error
            assert not reply.final
        with _engine(port, "new"):
            eventually(lambda: ask(client, address, timeout=1e6).answer is not None)
            reply = ask(client, address)
            assert reply.answer == wire.Description(descriptor=b"new")
            reply = ask(client, address, open_lease())
            assert reply.answer == wire.Gone(reason="this is new")


def test_a_stopped_peer_costs_its_deadline_and_answers_when_it_goes_on() -> None:
    port, clock = free_port(), Clock()
    address = f"127.0.0.1:{port}"
    with asking(clock=clock) as client, _engine(port, "engine") as process:
        assert ask(client, address).answer is not None
        process.send_signal(signal.SIGSTOP)
        ticket = client.ask(address, open_lease(), 5.0)
        for _ in range(6):
            clock.now += 1.0
            client.keep(address, "wakes", "it", 100.0)
        reply = replies_to(client, [ticket])[ticket]
        assert "has not answered within 5 s" in reply.error
        process.send_signal(signal.SIGCONT)
        assert ask(client, address, open_lease("other"), 1e6).answer is not None


def test_a_process_without_files_left_answers_those_who_ask() -> None:
    port = free_port()
    with contextlib.ExitStack() as stack, _engine(port, "engine", files=40):
        for _ in range(100):
            stranger = socket.create_connection(("127.0.0.1", port), 50.0)
            stack.enter_context(stranger)
        client = stack.enter_context(asking())
        eventually(lambda: ask(client, f"127.0.0.1:{port}", timeout=50.0).answer)


def test_the_round_trip_of_open_is_measured() -> None:
    """Shown with ``-s``; well below a millisecond on a quiet machine."""
    port, taken = free_port(), []
    with asking() as client, _engine(port, "engine"):
        address = f"127.0.0.1:{port}"
        assert ask(client, address).answer is not None
        for number in range(500):
            started = time.perf_counter()
            ticket = client.ask(address, open_lease(str(number)), 50.0)
            while not (replies := client.take()):
                time.sleep(0.0001)
            taken.append(time.perf_counter() - started)
            assert replies[0].ticket == ticket
            assert isinstance(replies[0].answer, wire.Granted)
    taken.sort()
    median, late = (1e6 * taken[len(taken) * at // 100] for at in (50, 99))
    print(f"open on loopback: median {median:.0f} us, p99 {late:.0f} us")  # noqa: T201
