"""What the P/D benchmark asks of engines; runs in their processes, which alone import
vLLM and what needs it."""

import random
import time
from collections.abc import Mapping
from itertools import count, pairwise
from typing import Any, Final, NamedTuple

from kvplugin.integration.demo.totals import read_totals

COUNTERS: Final = {
    "ours": ("kvplugin_nixl_read_bytes", "kvplugin_nixl_read_seconds"),
    "theirs": ("nixl_bytes_transferred", "nixl_xfer_time_seconds"),
}
"""Bytes and seconds of reads, by connector, as `read_totals` calls them."""
DRAIN_S: Final = 600.0
_numbers = count()


class Prefilled(NamedTuple):
    """A prompt whose blocks another engine may read."""

    params: dict[str, Any]
    ended: float
    """When its last step had ended, by the machine's monotonic clock."""


class Received(NamedTuple):
    """One request of the engine that reads."""

    first_token: float
    """When it was there, by the machine's monotonic clock."""
    nbytes: int
    seconds: float
    """Of the read, as the connector counts it."""
    longest: dict[str, float]
    """Seconds of the longest call of the connector in the worker, by what it does."""
    gaps: list[float]
    """Seconds between tokens of the requests that decoded meanwhile."""
    runs: int
    """Of neighbouring blocks that the prompt was read into."""


def watch(llm: Any) -> None:
    """Time the connector in the worker from now on."""
    llm.collective_rpc("pd_watch")


def prefill(llm: Any, prompt: list[int]) -> Prefilled:
    """Compute a prompt and hand it over."""
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    name = _add(llm, prompt, 1, params | dict.fromkeys(_REMOTE))
    while True:
        for output in llm.llm_engine.step():
            if output.request_id == name and output.finished:
                ended = time.monotonic()
                assert output.kv_transfer_params, "it was not handed over"
                return Prefilled(output.kv_transfer_params, ended)


_REMOTE: Final = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")


class Prepared(NamedTuple):
    """An engine that waits for a transfer."""

    others: list[str]
    """Requests that decode."""
    counted: dict[str, float]
    """Metrics so far."""


def prepare(llm: Any, others: int) -> Prepared:
    """All that need not be in the time of a transfer: start requests that decode."""
    names = [_add(llm, [7 + i] * 16, 1000) for i in range(others)]
    for _ in range(4 if others else 0):  # their prompts, and some tokens
        llm.llm_engine.step()
    llm.collective_rpc("pd_longest")
    return Prepared(names, read_totals())


def receive(
    llm: Any,
    connector: str,
    prompt: list[int],
    params: Mapping[str, Any],
    prepared: Prepared,
) -> Received:
    """Read a prompt and compute one token; then end what was prepared."""
    engine = llm.llm_engine
    stamps = [time.monotonic()]
    name = _add(llm, prompt, 1, dict(params))
    runs = 0
    while True:
        outputs = engine.step()
        now = time.monotonic()
        runs = runs or _runs(llm, name)
        if any(output.request_id in prepared.others for output in outputs):
            stamps.append(now)
        if any(output.request_id == name for output in outputs):
            break
    engine.abort_request(prepared.others)
    drain(llm)
    nbytes, seconds = (
        read_totals()[counter] - prepared.counted.get(counter, 0.0)
        for counter in COUNTERS[connector]
    )
    assert nbytes > 0, "nothing was read"
    (longest,) = llm.collective_rpc("pd_longest")
    gaps = [later - earlier for earlier, later in pairwise(stamps)]
    return Received(now, int(nbytes), seconds, longest, gaps, runs)


def drain(llm: Any) -> None:
    """Step until nothing is held for anybody."""
    deadline = time.monotonic() + DRAIN_S
    scheduler = _scheduler(llm)
    while scheduler.has_requests():
        llm.llm_engine.step()
        assert time.monotonic() < deadline, "blocks are still held"


def in_order(llm: Any) -> None:
    """Free blocks are taken in the order of their ids, as in a new engine."""
    queue = _pool(llm).free_block_queue
    blocks = queue.popleft_n(queue.num_free_blocks)
    queue.append_n(sorted(blocks, key=lambda block: block.block_id))


def fragment(llm: Any, seed: int) -> None:
    """Requests of one block each take all there are and end in any order."""
    rng = random.Random(seed)
    for i in range(_pool(llm).get_num_free_blocks() - 1):
        _add(llm, [1 + i % 400, 2 + i // 400], rng.randint(1, 12))
    drain(llm)


def _add(
    llm: Any,
    prompt: list[int],
    max_tokens: int,
    params: Mapping[str, Any] | None = None,
) -> str:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    name = f"bench-{next(_numbers)}"
    extra = {} if params is None else {"kv_transfer_params": dict(params)}
    llm.llm_engine.add_request(
        name,
        {"prompt_token_ids": prompt},
        SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args=extra,
        ),
    )
    return name


def _runs(llm: Any, name: str) -> int:
    """Runs of neighbouring ids among a request's blocks; 0 if it has none."""
    scheduler = _scheduler(llm)
    # vLLM adds something random to the names of requests.
    found = [key for key in scheduler.requests if key.startswith(f"{name}-")]
    found = found or [key for key in scheduler.requests if key == name]
    if not found:
        return 0
    (ids,) = scheduler.kv_cache_manager.get_block_ids(found[0])
    return sum(b != a + 1 for a, b in pairwise(ids)) + bool(ids)


def _scheduler(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


def _pool(llm: Any) -> Any:
    return _scheduler(llm).kv_cache_manager.block_pool
