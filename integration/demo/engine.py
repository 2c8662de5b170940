"""One vLLM engine in a process of its own, seen from the process that asks.

A process each: an engine's memory and threads are gone when the next one starts, and
vLLM's output goes to a log file, not between the lines of the demo.
"""

from collections.abc import Callable, Generator
from contextlib import closing
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

from kvplugin.errors import KVPluginError
from kvplugin.integration.demo.engine_process import (
    Finished,
    Job,
    Message,
    Started,
    engine_process,
)
from kvplugin.integration.demo.results import Answer, EngineRun

LOG_TAIL_LINES = 25
EXIT_WAIT_S = 10.0


class EngineError(KVPluginError):
    """The engine's process ended early; the message has the end of its log."""


def run_engine(job: Job, log: Path, show: Callable[[Message], None]) -> EngineRun:
    """Start vLLM in a new process, ask it everything, and end it.

    Args:
        job: the model, the sizes and the questions.
        log: file for all that the process prints; overwritten.
        show: is called with every message when it arrives.

    Raises:
        EngineError: the process ended before its last answer.
    """
    started, answers, finished = Started(0.0), [], None
    with closing(_messages(job, log)) as messages:
        for message in messages:
            show(message)
            match message:
                case Started():
                    started = message
                case Answer():
                    answers.append(message)
                case Finished():
                    finished = message
    if finished is None:
        raise EngineError(_obituary(log))
    return EngineRun(start_s=started.seconds, answers=answers, totals=finished.totals)


def _messages(job: Job, log: Path) -> Generator[Message, None, None]:
    """What the process says until it ends; it never outlives this generator."""
    # "spawn": vLLM must not inherit this process's threads and locks by a fork.
    context = get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=engine_process, args=(job, log, send))
    process.start()
    # With our copy of `send` open, a dead process would never read as end of file.
    send.close()
    try:
        yield from _until_closed(receive)
        process.join(EXIT_WAIT_S)
    finally:
        process.kill()
        process.join()


def _until_closed(receive: Connection) -> Generator[Message, None, None]:
    while True:
        try:
            yield receive.recv()
        except EOFError:
            return


def _obituary(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    tail = "\n".join(lines[-LOG_TAIL_LINES:])
    return f"vLLM ended before its last answer. The end of {log}:\n{tail}"
