"""The workloads of `core.py`, run in a process that sees one of the engines.

Reads lines ``WORKLOAD JSON-OPTIONS`` and answers each with a line of JSON. Ours and
both vLLM versions go through the same calls of the same names.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from random import Random
from statistics import median
from typing import Any

FULL = (
    "FullAttentionSpec",
    {"block_size": 16, "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"},
)
WINDOW = ("SlidingWindowSpec", FULL[1] | {"sliding_window": 1024})
GROUPS = {"full": [FULL], "hybrid": [FULL, WINDOW, WINDOW]}
PROMPT = 2000
VOCABULARY = 50_000


class Vllm:
    """An installed vLLM's core."""

    def __init__(self) -> None:
        from tests.oracles import vllm_core

        self._core = vllm_core
        self._hasher = vllm_core.hasher(16, "sha256")

    def manager(self, num_blocks: int, groups: list[Any], **options: Any) -> Any:
        return self._core.manager(num_blocks, groups, 8192, 16, **options)

    def request(self, request_id: str, tokens: list[int]) -> Any:
        return self._core.request(request_id, tokens, self._hasher)


class Ours:
    """This package's core."""

    def __init__(self) -> None:
        from kvplugin import hashing

        self._format = hashing.get_hash_format("kv_sha256")

    def manager(self, num_blocks: int, groups: list[Any], **options: Any) -> Any:
        from kvplugin import manager, spec

        layers = tuple(
            spec.KVCacheGroupSpec((f"layer{i}",), getattr(spec, name)(**fields))
            for i, (name, fields) in enumerate(groups)
        )
        config = spec.KVCacheConfig(num_blocks, (), layers)
        return manager.KVCacheManager(config, 8192, 16, **options)

    def request(self, request_id: str, tokens: list[int]) -> Any:
        from kvplugin.request import Request

        return Request(request_id, tokens, hash_format=self._format)


def prompt(seed: int, length: int = PROMPT) -> list[int]:
    """Tokens that no other seed shares."""
    return Random(seed).choices(range(VOCABULARY), k=length)


def cycle(
    engine: Any,
    groups: str,
    num_blocks: int = 100_000,
    shared: int = 0,
    count: int = 200,
    **options: Any,
) -> dict[str, float]:
    """Lookup, allocate, ids, free of new requests in a pool that is full of keys.

    `shared` tokens of each prompt are cached. Microseconds a request, by part.
    """
    manager = engine.manager(num_blocks, GROUPS[groups], **options)
    common = prompt(0, shared)
    for seed in range(1, num_blocks // (PROMPT // 16 * len(GROUPS[groups])) + 3):
        serve(manager, engine.request(f"warm{seed}", prompt(seed)), [])
    if shared:
        serve(manager, engine.request("common", common + prompt(-1, 16)), [])
    requests = [
        engine.request(f"r{seed}", common + prompt(-2 - seed, PROMPT - shared))
        for seed in range(count)
    ]
    manager.take_events()
    parts: list[tuple[float, ...]] = []
    gc.collect()
    for request in requests:
        serve(manager, request, parts)
        manager.take_events()
    names = ("lookup", "allocate", "ids", "free")
    result = {
        name: median(column) * 1e6
        for name, column in zip(names, zip(*parts, strict=True), strict=True)
    }
    return result | {"total": median(map(sum, parts)) * 1e6}


def serve(manager: Any, request: Any, parts: list[tuple[float, ...]]) -> None:
    """One request from arrival to end, with the time of each part."""
    manager.new_step_starts()
    clock = time.perf_counter
    t0 = clock()
    blocks, hit = manager.get_computed_blocks(request)[:2]
    t1 = clock()
    manager.allocate_slots(request, request.num_tokens - hit, hit, blocks)
    t2 = clock()
    manager.get_block_ids(request.request_id)
    t3 = clock()
    manager.free(request)
    parts.append((t1 - t0, t2 - t1, t3 - t2, clock() - t3))


def decode(
    engine: Any, groups: str, num_blocks: int = 100_000, steps: int = 48, **options: Any
) -> dict[str, float]:
    """One token for each of 256 running requests: microseconds a request."""
    manager = engine.manager(num_blocks, GROUPS[groups], **options)
    requests = [engine.request(f"d{i}", prompt(i, PROMPT + i % 16)) for i in range(256)]
    for request in requests:
        manager.allocate_slots(request, request.num_tokens)
        request.num_computed_tokens = request.num_tokens
    gc.collect()
    gc.disable()
    took = []
    for _ in range(steps):
        for request in requests:
            request.append_output_token_ids(7)
        manager.new_step_starts()
        start = time.perf_counter()
        for request in requests:
            manager.allocate_slots(request, 1).get_block_ids(allow_none=True)
        took.append((time.perf_counter() - start) / len(requests))
        for request in requests:
            request.num_computed_tokens = request.num_tokens
        manager.take_events()
    gc.enable()
    return {"total": median(took) * 1e6}


def build(engine: Any, num_blocks: int) -> dict[str, float]:
    """Milliseconds to construct the pool, the least and the median of seven."""
    took = []
    for _ in range(7):
        gc.collect()
        start = time.perf_counter()
        manager = engine.manager(num_blocks, GROUPS["full"])
        took.append((time.perf_counter() - start) * 1e3)
        del manager
    return {"least": min(took), "total": median(took)}


def memory(engine: Any, num_blocks: int) -> dict[str, float]:
    """Bytes a block, once for a new pool and once for one full of keys whose requests
    are gone."""
    engine.manager(100, GROUPS["full"])
    gc.collect()
    before = _resident_bytes()
    manager = engine.manager(num_blocks, GROUPS["full"])
    gc.collect()
    fresh = _resident_bytes()
    for seed in range(1, num_blocks // (PROMPT // 16) + 2):
        serve(manager, engine.request(f"warm{seed}", prompt(seed)), [])
    gc.collect()
    full = _resident_bytes()
    return {
        "new": (fresh - before) / num_blocks,
        "total": (full - before) / num_blocks,
    }


def live(engine: Any, num_blocks: int, count: int) -> dict[str, float]:
    """A large pool with many live requests: seconds to build and fill, microseconds
    of a decode call, and of a cycle of one more request, with `count` alive."""
    start = time.perf_counter()
    manager = engine.manager(num_blocks, GROUPS["full"])
    built = time.perf_counter() - start
    requests = [engine.request(f"l{i}", prompt(i, 1200 + i % 16)) for i in range(count)]
    start = time.perf_counter()
    for request in requests:
        blocks, hit = manager.get_computed_blocks(request)[:2]
        manager.allocate_slots(request, request.num_tokens - hit, hit, blocks)
        request.num_computed_tokens = request.num_tokens
    filled = time.perf_counter() - start
    steps = []
    for _ in range(16):
        for request in requests:
            request.append_output_token_ids(7)
        start = time.perf_counter()
        for request in requests:
            manager.allocate_slots(request, 1)
        steps.append((time.perf_counter() - start) / count)
        for request in requests:
            request.num_computed_tokens = request.num_tokens
    parts: list[tuple[float, ...]] = []
    for seed in range(50):
        serve(manager, engine.request(f"more{seed}", prompt(-1 - seed)), parts)
    return {
        "build_s": built,
        "admit_us": filled / count * 1e6,
        "decode_us": median(steps) * 1e6,
        "cycle_us": median(map(sum, parts)) * 1e6,
        "resident_mib": _resident_bytes() / 2**20,
    }


def _resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


WORKLOADS: dict[str, Callable[..., dict[str, float]]] = {
    "cycle": cycle,
    "decode": decode,
    "build": build,
    "memory": memory,
    "live": live,
}


def main(engine_name: str) -> None:
    """Answer the requests on standard input."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    # vLLM prints while it is imported; the answers need a clean stream.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    engine: Any = Ours() if engine_name == "kvplugin" else Vllm()
    print("ready", file=answers)
    for line in sys.stdin:
        name, options = line.split(" ", 1)
        print(json.dumps(WORKLOADS[name](engine, **json.loads(options))), file=answers)


if __name__ == "__main__":
    main(sys.argv[1])
