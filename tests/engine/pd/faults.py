"""Faults of reads, arranged in the consumer's process before its engine starts."""

import ctypes
import threading
from collections.abc import Callable
from typing import Any, Final

from kvplugin.connectors.nixl.messages import ReadOrder
from kvplugin.connectors.nixl.read_thread import ReadThreads
from kvplugin.connectors.nixl.worker import NixlWorker
from kvplugin.contract import WorkerOutcome
from tests.engine.asking import Answer, answer_of, scheduler
from tests.engine.pd.handing import Params

_LONGEST_HOLD: Final = 60.0
"""Seconds; only so that a test that fails does not hang."""


class _Reads:
    """Of this process: what they are to do, and what they did."""

    may_begin = threading.Event()
    zeroed: int | None = None
    """Group whose blocks are zeroed when they have arrived."""
    orders: dict[str, ReadOrder] = {}  # noqa: RUF012  # the process has one engine


def reads_can_be_watched() -> None:
    """From now on `hold_reads` and `zero_group` have an effect in this process."""
    _Reads.may_begin.set()
    submit, start, poll = ReadThreads.submit, NixlWorker._start, NixlWorker.poll

    def held(self: Any, order: ReadOrder, after: Callable[[], None]) -> None:
        def wait() -> None:
            _Reads.may_begin.wait(_LONGEST_HOLD)
            after()

        submit(self, order, wait)

    def noted(self: Any, memory: Any, order: ReadOrder) -> None:
        _Reads.orders[order.request_id] = order
        start(self, memory, order)

    def zeroing(self: Any) -> WorkerOutcome:
        outcome = poll(self)
        for request_id in outcome.finished_loads:
            _zero(self, _Reads.orders.pop(request_id))
        return outcome

    ReadThreads.submit = held  # type: ignore[method-assign]
    NixlWorker._start = noted  # type: ignore[method-assign]
    NixlWorker.poll = zeroing  # type: ignore[method-assign]


def _zero(worker: Any, order: ReadOrder) -> None:
    for part in order.parts:
        if part.group != _Reads.zeroed:
            continue
        for layer in worker._registered.rank.layers:
            if layer.group != part.group:
                continue
            for run in layer.runs:
                for block in part.local_ids:
                    start = layer.address + run.offset + block * run.stride
                    ctypes.memset(start, 0, run.nbytes)


def zero_group(llm: Any, group: int | None) -> None:
    """What reads bring of this group is zeroed; None: of no group."""
    del llm
    _Reads.zeroed = group


def hold_reads(llm: Any, held: bool) -> None:
    """Let reads wait before their first byte, or go on."""
    del llm
    if held:
        _Reads.may_begin.clear()
    else:
        _Reads.may_begin.set()


def abort_while_reading(llm: Any, prompt: list[int], params: Params) -> bool:
    """Abort a request whose read is held, then let it go on; whether it was reading.

    Its read goes on after the request has gone.
    """
    hold_reads(llm, True)
    try:
        was_reading = abort_when(llm, prompt, params, "WAITING_FOR_REMOTE_KVS")
    finally:
        hold_reads(llm, False)
    return was_reading


def abort_when(llm: Any, prompt: list[int], params: Params, status: str) -> bool:
    """Abort a request when it is in a state (of vLLM's `RequestStatus`); whether it
    ever was."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    engine.add_request(
        "aborted",
        {"prompt_token_ids": prompt},
        SamplingParams(
            temperature=0.0,
            max_tokens=64,
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": params},
        ),
    )
    was_there = False
    for _ in range(2000):
        requests = scheduler(llm).requests.values()
        if any(request.status.name == status for request in requests):
            was_there = True
            break
        if not requests:
            break
        engine.step()
    engine.abort_request(["aborted"])
    return was_there


def begin(llm: Any, prompt: list[int], params: Params, status: str) -> bool:
    """Send a request and step until it is in a state (of vLLM's `RequestStatus`);
    whether it ever was. `finish` goes on with it."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=4,
        logprobs=5,
        ignore_eos=True,
        detokenize=False,
        extra_args={"kv_transfer_params": params},
    )
    engine = llm.llm_engine
    engine.add_request("begun", {"prompt_token_ids": prompt}, sampling)
    for _ in range(2000):
        requests = list(scheduler(llm).requests.values())
        if any(request.status.name == status for request in requests):
            return True
        if not requests:
            return False
        engine.step()
    return False


def finish(llm: Any) -> Answer:
    """Let reads go on, and step until the request of `begin` has its answer."""
    hold_reads(llm, False)
    while True:
        for output in llm.llm_engine.step():
            if output.finished:
                return answer_of(output)
