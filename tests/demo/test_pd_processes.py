"""Programs are waited for with a deadline, and gone afterwards in every case."""

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvplugin.errors import KVPluginError
from kvplugin.integration.demo import processes
from kvplugin.integration.demo.processes import (
    Program,
    free_ports,
    running,
    wait_until_ready,
)

SERVER = "import http.server as h; h.test(h.SimpleHTTPRequestHandler, port={port})"
LIVENESS_S = 60.0


def program(tmp_path: Path, code: str, name: str = "a server") -> Program:
    (port,) = free_ports(1)
    words = [sys.executable, "-c", code.format(port=port)]
    log = tmp_path / f"{name}.log"
    return Program(name, words, port, log, health="/")


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_for(file: Path) -> str:
    deadline = time.monotonic() + LIVENESS_S
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < deadline, f"no {file}"
        time.sleep(0.02)
    return file.read_text()


def test_ready_is_when_all_answer(tmp_path: Path) -> None:
    servers = [program(tmp_path, SERVER, name) for name in ("one", "two")]
    with running(servers) as started:
        wait_until_ready(started, LIVENESS_S)
        assert all(one.healthy for one in started)
    assert not any(one.healthy for one in started)


def test_a_server_that_dies_is_named_with_its_last_words(tmp_path: Path) -> None:
    dies = program(tmp_path, "print('no such model', flush=True); raise SystemExit(7)")
    lives = program(tmp_path, SERVER, "another")
    with running([lives, dies]) as started:
        with pytest.raises(KVPluginError, match=r"(?s)status 7 before.*no such model"):
            wait_until_ready(started, LIVENESS_S)
        (pid, _) = (one.process.pid for one in started)
    assert not alive(pid)


def test_a_server_that_never_answers_is_given_up(tmp_path: Path) -> None:
    silent = program(
        tmp_path,
        "import time; print('still loading', flush=True); time.sleep(1000)",
        "slow",
    )
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        wait_for(tmp_path / "slow.log")

    with (
        running([silent]) as started,
        pytest.raises(KVPluginError, match=r"(?s)slow .*after 30 s.*still loading"),
    ):
        wait_until_ready(started, 30.0, clock=lambda: now, sleep=sleep)
    assert 30 < now < 32


def test_a_program_that_does_not_exist_is_named(tmp_path: Path) -> None:
    nothing = Program("the router", [str(tmp_path / "nothing")], 1, tmp_path / "log")
    server = program(tmp_path, SERVER)
    with (
        pytest.raises(KVPluginError, match="the router cannot be started"),
        running([server, nothing]),
    ):
        pytest.fail("it was started")


STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen(
    [sys.executable, "-c", "import signal, time; "
     "signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(1000)"]
)
open({file!r}, "w").write(f"{{child.pid}}")
{then}
"""


@pytest.mark.parametrize("then", ["time.sleep(1000)", "os._exit(0)"])
def test_nothing_outlives_the_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """Neither a process that ignores the request to end, nor a child whose parent is
    gone."""
    monkeypatch.setattr(processes, "STOP_WAIT_S", 0.1)
    file = tmp_path / "child"
    code = STUBBORN.format(file=str(file), then=then).replace("{", "{{")
    stubborn = program(tmp_path, code.replace("}", "}}"))
    with running([stubborn]) as started:
        child = int(wait_for(file))
        assert alive(child)
    deadline = time.monotonic() + LIVENESS_S
    while alive(child):
        assert time.monotonic() < deadline
    assert not alive(started[0].process.pid)


OWNER = """
import sys, time
from pathlib import Path
from kvplugin.integration.demo.processes import Program, running
sleeper = Program("a", [sys.executable, "-c", "import time; time.sleep(1000)"], 1)
with running([sleeper]) as (one,):
    Path(sys.argv[1]).write_text(str(one.process.pid))
    time.sleep(1000)
"""


@pytest.mark.parametrize("word", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_all(tmp_path: Path, word: signal.Signals) -> None:
    file = tmp_path / "pid"
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(file)], stderr=subprocess.DEVNULL
    )
    pid = int(wait_for(file))
    owner.send_signal(word)
    assert owner.wait(LIVENESS_S) != 0
    assert not alive(pid)


IMPATIENT = """
import sys, time
from pathlib import Path
from kvplugin.integration.demo.processes import Program, running
code = "import signal, sys, time; from pathlib import Path\\n" \
  "def asked(*_): Path(sys.argv[1]).write_text('asked')\\n" \
  "signal.signal(signal.SIGINT, asked); Path(sys.argv[2]).write_text('ready')\\n" \
  "while True: time.sleep(1)"
words = [sys.executable, "-c", code, *sys.argv[2:]]
with running([Program("a", words, 1)]) as (one,):
    Path(sys.argv[1]).write_text(str(one.process.pid))
    time.sleep(1000)
"""


@pytest.mark.parametrize("word", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_does_not_wait(tmp_path: Path, word: signal.Signals) -> None:
    """Of a program that ignores the first one, nothing is left either."""
    pid, asked, ready = (tmp_path / name for name in ("pid", "asked", "ready"))
    words = [sys.executable, "-c", IMPATIENT, str(pid), str(asked), str(ready)]
    owner = subprocess.Popen(words, stderr=subprocess.DEVNULL)
    child = int(wait_for(pid))
    wait_for(ready)
    owner.send_signal(word)
    wait_for(asked)
    owner.send_signal(word)
    assert owner.wait(LIVENESS_S) != 0
    assert not alive(child)


def test_free_ports_differ() -> None:
    ports: Sequence[int] = free_ports(20)
    assert len(set(ports)) == 20
