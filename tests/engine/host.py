"""Stock vLLM in a child process that runs functions of the tests beside the engine."""

import atexit
import contextlib
import multiprocessing
import os
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvplugin.integration.demo.environment import ENVIRONMENT
from kvplugin.integration.vllm.render import offload_transfer_config
from tests.engine.version import arguments_here

ENGINE_DEFAULTS = {
    "max_model_len": 4096,
    "enforce_eager": True,
    "disable_log_stats": False,
    "seed": 0,
}
_STEP_SECONDS = 0.001
"""vLLM's own loop sleeps as long after a step that computed nothing."""


class EngineStartError(Exception):
    """The child could not start its engine, or a function raised in it."""


class EngineHost:
    """An engine in a process of its own.

    Args:
        log: takes everything that the child prints.
        prepare: runs in the child before the engine starts, to arrange a fault.
        environment: variables of the child, over `ENVIRONMENT`.
        steps: the engine goes on by itself while it is not asked anything, as one in a
            process of its own does.
        engine: arguments of `vllm.LLM`, over `ENGINE_DEFAULTS`.
    """

    def __init__(
        self,
        log: Path,
        *,
        prepare: Callable[[], None] | None = None,
        environment: Mapping[str, str] | None = None,
        steps: bool = False,
        **engine: Any,
    ) -> None:
        self.log = log
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} | ENVIRONMENT
        self._process = context.Process(
            target=_serve,
            args=(
                theirs,
                log,
                prepare,
                variables | dict(environment or {}),
                ENGINE_DEFAULTS | engine,
                steps,
            ),
        )
        self._process.start()
        theirs.close()
        # Of one that nobody closes: multiprocessing waits for its children at the end.
        atexit.register(self._pipe.close)
        self._answer()

    @property
    def pid(self) -> int:
        """Of the child."""
        assert self._process.pid is not None
        return self._process.pid

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(llm, *args)` in the child; all of it must be picklable."""
        self._pipe.send((function, args))
        return self._answer()

    def _answer(self) -> Any:
        try:
            ok, value = self._pipe.recv()
        except EOFError:
            ok, value = False, f"the engine's process died; see {self.log}"
        if not ok:
            raise EngineStartError(value)
        return value

    def close(self) -> None:
        """End the child and its engine."""
        self._pipe.close()
        self._process.join(30)
        self._process.kill()
        self._process.join()


def _serve(
    pipe: Connection,
    log: Path,
    prepare: Callable[[], None] | None,
    environment: Mapping[str, str],
    engine: Mapping[str, Any],
    steps: bool,
) -> None:
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment)
    try:
        if prepare is not None:
            prepare()
        from vllm import LLM

        llm = LLM(**arguments_here(engine))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        return
    pipe.send((True, None))
    with contextlib.suppress(EOFError):
        while True:
            while steps and not pipe.poll(_STEP_SECONDS):
                _step(llm)
            function, args = pipe.recv()
            pipe.send(_call(function, llm, args))
    # Its own processes, where it has them, would outlive this one.
    llm.llm_engine.engine_core.shutdown()
    os._exit(0)  # the interpreter's own end takes seconds and tests nothing


def _step(llm: Any) -> None:
    """One step, if there is anything to do: answers of requests that were given up are
    nobody's."""
    if llm.llm_engine.engine_core.engine_core.scheduler.has_requests():
        llm.llm_engine.step()


def _call(function: Callable[..., Any], llm: Any, args: Any) -> tuple[bool, Any]:
    try:
        return True, function(llm, *args)
    except Exception:
        return False, traceback.format_exc()


def offload(cpu_bytes: int, failure_policy: str = "recompute", **settings: Any) -> Any:
    """`kv_transfer_config` with our connector, as `kvplugin config` renders it."""
    return offload_transfer_config(
        {"cpu_bytes_to_use": cpu_bytes, **settings},
        failure_policy,  # type: ignore[arg-type]
    )
