"""Engines in processes of their own: NIXL between them, and what death leaves."""

import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from kvplugin.connectors.nixl.config import NixlConfig, Role
from kvplugin.integration.reference import Model, ReferenceEngine, SamplingParams
from kvplugin.integration.reference.connector import nixl
from kvplugin.integration.reference.orders import Served
from kvplugin.integration.reference.process import EngineProcess
from tests.ports import free_port
from tests.reference.bench import shaped, tokens, window
from tests.reference.models import (
    CHUNKED,
    FULL,
    MLA,
    RECORDS,
    RECURRENT,
    settings,
    tiny,
)
from tests.reference.pd import HANDS_OVER, PATIENCE

KINDS: dict[str, Any] = {
    "full": (FULL, FULL),
    "windows": (FULL, window(10), CHUNKED),
    "states": (RECURRENT, FULL),
    "latents": (MLA, MLA),
    "records": (RECORDS, RECORDS),
}


def model_of(kind: str) -> Model:
    if kind == "records":
        return tiny(KINDS[kind], dtype="float32")
    return shaped(KINDS[kind])


def make(
    kind: str, role: str, port: int, connector: Mapping[str, Any], changes: Any
) -> ReferenceEngine:
    """What the processes serve."""
    config = NixlConfig(**{"side_channel_port": port, **connector})
    return ReferenceEngine(
        model_of(kind),
        settings(**{"engine_id": f"{role}-{port}", "max_model_len": 128, **changes}),
        nixl(config, Role(role)),
    )


class Both:
    """A prefill and a decode process."""

    def __init__(self, kind: str, connector: Any, theirs: Any, ours: Any) -> None:
        self.kind, self._connector, self._theirs = kind, connector, theirs
        self.port = free_port()
        self.p = self.start("producer", self.port, theirs)
        self.d = self.start("consumer", free_port(), ours)

    def start(self, role: str, port: int, changes: Any) -> EngineProcess:
        return EngineProcess(make, self.kind, role, port, self._connector, changes)

    def restart_producer(self) -> None:
        self.p = self.start("producer", self.port, self._theirs)
        self.p.ready()

    def prefill(self, prompt: Sequence[int]) -> Any:
        params = SamplingParams(max_tokens=1)
        id_ = self.p.add_request(prompt, params, kv_transfer_params=HANDS_OVER)
        (served,) = self.p.finish([id_])
        return served.kv_transfer_params

    def decode(self, prompt: Sequence[int], params: Any) -> Served:
        sampling = SamplingParams(max_tokens=6)
        id_ = self.d.add_request(prompt, sampling, kv_transfer_params=params)
        (served,) = self.d.finish([id_])
        return served

    def until_empty(self, process: EngineProcess) -> None:
        """Its blocks come back."""
        late = time.monotonic() + PATIENCE
        while (stats := process.stats()).has_work:
            process.step(20)
            assert time.monotonic() < late, stats
        assert stats.num_free_blocks == stats.num_usable_blocks

    def close(self) -> None:
        for process in (self.p, self.d):
            process.close()


@contextmanager
def processes(
    kind: str, connector: Any = None, theirs: Any = None, ours: Any = None
) -> Iterator[Both]:
    both = Both(kind, connector or {}, theirs or {}, ours or {})
    try:
        for process in (both.p, both.d):
            process.ready()
        yield both
    finally:
        both.close()


def alone(kind: str, prompt: Sequence[int], changes: Any) -> Served:
    """The answer of a single engine."""
    engine = ReferenceEngine(
        model_of(kind), settings(**{"max_model_len": 128, **changes})
    )
    (answer,) = engine.generate([list(prompt)], SamplingParams(max_tokens=6))
    return Served.of(answer)


def assert_same(kind: str, one: Served, other: Served) -> None:
    assert one.token_ids == other.token_ids
    close = 1e-9 if kind != "records" else 0.1
    assert one.log_probs == pytest.approx(other.log_probs, abs=close)


@pytest.mark.parametrize(
    "kind",
    ["full", *(pytest.param(k, marks=pytest.mark.full) for k in list(KINDS)[1:])],
)
def test_nixl_between_two_processes(kind: str) -> None:
    """Every byte goes through NIXL (`same_host` is off)."""
    blocks = {"block_size": 16}
    theirs = blocks | ({"layout": "HND", "block_size": 32} if kind == "full" else {})
    connector = {"same_host": "off", "handshake_timeout_s": PATIENCE}
    with processes(kind, connector, theirs, blocks) as both:
        for length in (33, 64, 90):
            prompt = tokens(length, seed=length)
            served = both.decode(prompt, both.prefill(prompt))
            assert served.num_cached_tokens == length - 1
            assert_same(kind, served, alone(kind, prompt, blocks))
        counters = both.d.stats().connector
        assert counters["reads"] == 3
        both.until_empty(both.p)
        both.until_empty(both.d)


def test_processes_that_die() -> None:
    """A consumer with a lease opened, a producer with a lease given, and both; whoever
    is left answers right and has all its blocks."""
    blocks = {"block_size": 8}
    connector = {
        "backends": [],
        "kv_lease_duration": 5.0,
        "handshake_timeout_s": 5.0,
        "dead_peer_ttl_s": 0.0,
    }
    with processes("full", connector, blocks, blocks) as both:
        prompt = tokens(40)
        params = both.prefill(prompt)
        assert both.decode(prompt, params).num_cached_tokens == 39
        # The producer dies with a lease that the consumer was told of.
        other = tokens(50, seed=2)
        stale = both.prefill(other)
        kill(both.p)
        served = both.decode(other, stale)
        assert served.num_cached_tokens == 0
        assert_same("full", served, alone("full", other, blocks))
        # It comes back on its address.
        both.restart_producer()
        assert both.decode(tokens(60, seed=3), stale).num_cached_tokens == 0
        again = tokens(70, seed=4)
        params = both.prefill(again)
        served = both.decode(again, params)
        assert served.num_cached_tokens == 69
        assert_same("full", served, alone("full", again, blocks))
        # The consumer dies before it has read.
        both.prefill(tokens(30, seed=5))
        kill(both.d)
        both.until_empty(both.p)


def kill(process: EngineProcess) -> None:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process._process.join(PATIENCE)
