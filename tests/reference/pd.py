"""A prefill engine and a decode engine over the real connector, in one process."""

import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch

from kvplugin.connectors.nixl.config import NixlConfig, Role
from kvplugin.integration.reference import (
    Answer,
    LayerConfig,
    Model,
    ReferenceEngine,
    SamplingParams,
)
from kvplugin.integration.reference.config import EngineConfig
from kvplugin.integration.reference.connector import nixl
from kvplugin.integration.reference.ranks import Drafter
from tests.ports import free_port
from tests.reference.bench import shaped
from tests.reference.models import assert_empty, compare, settings

Params = Mapping[str, Any]
HANDS_OVER: Final[Params] = MappingProxyType(
    {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
)
"""What a router sends with the prefill."""
PATIENCE: Final = 60.0
"""Seconds after which a test gives up on something that should take none."""


def patiently(done: Callable[[], bool], what: str, *engines: ReferenceEngine) -> None:
    """Step the engines until something has come about."""
    late = time.monotonic() + PATIENCE
    while not done():
        news = [engine.step() for engine in engines]
        if not any(news):
            time.sleep(0.0005)
        states = [engine.state() for engine in engines]
        assert time.monotonic() < late, f"still waiting for {what}: {states}"


class Time:
    """Stands still; a test moves it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Side:
    """One engine.

    Args:
        model: what it serves.
        role: what it is to the other.
        engine_id: its name.
        connector: keys of `NixlConfig`.
        drafter: proposes tokens, if there is one.
        clock: of leases and deadlines.
        changes: of `settings`.
    """

    def __init__(
        self,
        model: Model,
        role: Role,
        engine_id: str,
        *,
        connector: Mapping[str, Any] = MappingProxyType({}),
        drafter: Callable[[EngineConfig], Drafter] | None = None,
        clock: Callable[[], float] = time.monotonic,
        **changes: Any,
    ) -> None:
        self.model = model
        config = settings(**{"engine_id": engine_id, "max_model_len": 256} | changes)
        self.port = free_port()
        keys: dict[str, Any] = {
            "side_channel_port": self.port,
            "handshake_timeout_s": PATIENCE,
            "kv_lease_duration": 10 * PATIENCE,
            "transfer_timeout_s": PATIENCE,
            "backends": [],  # in one process the kernel reads
        }
        self.engine = ReferenceEngine(
            model,
            config,
            nixl(NixlConfig(**keys | dict(connector)), role, clock=clock),
            drafter=None if drafter is None else drafter(config),
            clock=clock,
        )
        self.prompts: dict[str, list[int]] = {}
        self.counters: dict[str, float] = {}

    def add(
        self, prompt: Sequence[int], max_tokens: int, params: Params | None, **more: Any
    ) -> str:
        sampling = SamplingParams(max_tokens=max_tokens, **more.pop("sampling", {}))
        req_id = self.engine.add_request(
            prompt, sampling, kv_transfer_params=params, **more
        )
        request = self.engine.scheduler.requests[req_id].request
        self.prompts[req_id] = list(prompt)[: request.num_prompt_tokens]
        return req_id

    def answer(self, req_id: str) -> Answer:
        return self.engine.answers[req_id]

    def is_done(self, *req_ids: str) -> bool:
        return all(self.answer(req_id).finish_reason for req_id in req_ids)

    def compare(self, req_id: str, **how: Any) -> None:
        """The answer is that of an engine that does everything itself."""
        compare(self.model, self.prompts[req_id], self.answer(req_id), **how)

    def count(self, name: str) -> float:
        """A counter of the connector, from the start on, or a gauge."""
        half = self.engine.scheduler_half
        stats = None if half is None else half.take_stats()
        if stats is not None:
            for key, value in stats.counters.items():
                self.counters[key] = self.counters.get(key, 0) + value
            self.counters |= stats.gauges
        return self.counters.get(name, 0)

    @property
    def num_used_blocks(self) -> int:
        pool = self.engine.manager.block_pool
        return pool.num_usable_blocks - pool.get_num_free_blocks()

    def close(self) -> None:
        self.engine.close()


class Held:
    """Reads of a consumer's first rank that do not begin before the test says so."""

    def __init__(self, side: Side) -> None:
        self.orders: list[Any] = []
        worker: Any = side.engine.worker_halves[0]
        self._reads = worker._reads
        self._submit = worker._reads.submit
        self._reads.submit = lambda *order: self.orders.append(order)

    def let_go(self) -> None:
        """They begin, and later ones at once."""
        self._reads.submit = self._submit
        for order in self.orders:
            self._submit(*order)


class Pair:
    """Both; in one process, over the side channel on the loopback interface.

    Args:
        layers: of the model; or `model`.
        producer: changes of the prefill side's `Side`.
        consumer: of the decode side's.
        connector: keys of both sides' `NixlConfig`.
        both: changes of both sides.
    """

    def __init__(
        self,
        layers: Sequence[LayerConfig] = (LayerConfig(), LayerConfig()),
        *,
        model: Model | None = None,
        producer: Mapping[str, Any] = MappingProxyType({}),
        consumer: Mapping[str, Any] = MappingProxyType({}),
        connector: Mapping[str, Any] = MappingProxyType({}),
        **both: Any,
    ) -> None:
        self.model = model = shaped(layers) if model is None else model

        def side(role: Role, name: str, changes: Mapping[str, Any]) -> Side:
            keys = {**connector, **changes.get("connector", {})}
            own = {**both, **changes, "connector": keys}
            return Side(own.pop("model", model), own.pop("role", role), name, **own)

        self.p = side(Role.PRODUCER, "prefill", producer)
        self.d = side(Role.CONSUMER, "decode", consumer)

    def step(self) -> None:
        for side in (self.p, self.d):
            side.engine.step()

    def until(self, done: Callable[[], bool], what: str) -> None:
        patiently(done, what, self.p.engine, self.d.engine)

    def prefill(self, prompt: Sequence[int], **more: Any) -> dict[str, Any]:
        """Compute a prompt on the producer; what it hands over."""
        req_id = self.p.add(prompt, 1, more.pop("params", HANDS_OVER), **more)
        patiently(lambda: self.p.is_done(req_id), "the prefill", self.p.engine)
        params = self.p.answer(req_id).kv_transfer_params
        assert params is not None
        return dict(params)

    def decode(
        self,
        prompt: Sequence[int],
        params: Params | None,
        max_tokens: int = 4,
        **how: Any,
    ) -> Answer:
        """Go on with it on the consumer, and compare the answer."""
        tolerance = how.pop("tolerance", 1e-9)
        req_id = self.d.add(prompt, max_tokens, params, **how)
        self.until(lambda: self.d.is_done(req_id), "the decode")
        self.d.compare(req_id, tolerance=tolerance)
        return self.d.answer(req_id)

    def serve(self, prompt: Sequence[int], max_tokens: int = 4, **how: Any) -> Answer:
        """Prefill, then decode."""
        return self.decode(prompt, self.prefill(prompt), max_tokens, **how)

    def drain(self) -> None:
        """Everything ends, and every block of both pools comes back."""
        engines = self.p.engine, self.d.engine
        # An engine does not ask to be stepped for reads that nobody waits for.
        self.until(
            lambda: (
                not any(
                    e.has_work() or e.scheduler.references.held.total() for e in engines
                )
            ),
            "the end",
        )
        for engine in engines:
            assert_empty(engine)

    def close(self) -> None:
        for side in (self.d, self.p):
            side.close()

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self.drain()
        finally:
            self.close()


def spoil(engine: ReferenceEngine, params: Params, group: int) -> None:
    """Overwrite what an engine has handed over of one group: whoever reads it answers
    something else."""
    blocks = [block for block in params["remote_block_ids"][group] if block]
    assert blocks
    for runner in engine.ranks.runners:
        ratio = runner.tables.tables[group].shape.ratio
        for cache in runner.tensors.layers.values():
            if cache.group != group:
                continue
            k = 1 if cache.plan is None else ratio
            rows = [block * k + part for block in blocks for part in range(k)]
            for view, tensor in zip(cache.views, cache.tensors, strict=True):
                index = torch.tensor(rows)
                axis = view.tensor.block_axis
                values = tensor.index_select(axis, index)
                if values.dtype is torch.uint8:
                    values = values.flip(axis) + 1
                else:
                    values = values + 0.5
                tensor.index_copy_(axis, index, values)
