"""Loads that fail, or wait, as often as a test says; in the engine's process."""

import threading
import time
from typing import Any, ClassVar

from kvplugin.connectors.offload.copy_thread import CopyThread
from kvplugin.connectors.offload.host_copies import HostCopies
from kvplugin.connectors.offload.scheduler import OffloadScheduler
from tests.engine.asking import Answer, answer_of, scheduler

ALWAYS = -1
"""Times that never end."""


class _Loads:
    """What becomes of the next copies out of host memory."""

    to_fail: ClassVar[int] = 0
    gate: ClassVar[threading.Event] = threading.Event()
    """Loads wait for it."""
    ahead: ClassVar[float] = 0.0
    """Seconds that the connector's clock is ahead."""


def loads_can_fail() -> None:
    """Before the engine starts: from now on `fail_loads`, `hold_loads` and
    `answer_past_the_deadline` decide."""
    execute = HostCopies.execute
    _Loads.gate.set()
    for timed in (OffloadScheduler, CopyThread):
        timed.__init__.__kwdefaults__["clock"] = _clock

    def maybe(self: HostCopies, job: Any) -> int:
        if job.store:
            return execute(self, job)
        _Loads.gate.wait()
        if _Loads.to_fail:
            _Loads.to_fail -= 1
            raise OSError("made to fail by the test")
        return execute(self, job)

    HostCopies.execute = maybe  # type: ignore[method-assign]


def _clock() -> float:
    return time.monotonic() + _Loads.ahead


def fail_loads(llm: Any, times: int = ALWAYS) -> None:
    """Let the next `times` loads fail; 0: none."""
    del llm
    _Loads.to_fail = times


def hold_loads(llm: Any) -> None:
    """Let loads wait until `release_loads`."""
    del llm
    _Loads.gate.clear()


def release_loads(llm: Any) -> None:
    """End the wait."""
    del llm
    _Loads.gate.set()


def answer_past_the_deadline(llm: Any, prompt: list[int], seconds: float) -> Answer:
    """The answer to a prompt whose load is held, after so many seconds of waiting."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    greedy = SamplingParams(temperature=0, max_tokens=4, logprobs=5, detokenize=False)
    engine.add_request("late", {"prompt_token_ids": prompt}, greedy)
    engine.step()
    (request,) = scheduler(llm).requests.values()
    assert request.status.name == "WAITING_FOR_REMOTE_KVS"
    _Loads.ahead += seconds
    for _ in range(1000):
        for output in engine.step():
            if output.finished:
                return answer_of(output)
    raise AssertionError("the request still waits")
