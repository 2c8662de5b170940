"""A watched engine with scripted transfers, for scenarios."""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from kvplugin.connectors.offload.config import OffloadConfig
from kvplugin.connectors.offload.host_copies import HostCopies
from kvplugin.connectors.offload.messages import HostPool
from kvplugin.connectors.offload.scheduler import OffloadScheduler
from kvplugin.connectors.offload.worker import OffloadWorker
from kvplugin.contract import CopyJob, EngineInfo, Transport
from kvplugin.integration.reference import (
    AttentionDrafter,
    LayerConfig,
    Model,
    ReferenceEngine,
    SamplingParams,
    random_draft_model,
)
from kvplugin.integration.reference.connector import Connector
from kvplugin.integration.reference.content import ContentWatch
from kvplugin.testing import COMPLETES, Fate, FaultyTransport
from tests.reference.drafters import Oracle
from tests.reference.models import (
    FULL,
    RECURRENT,
    assert_empty,
    compare,
    settings,
    step_to_the_end,
    tiny,
)

BLOCK_BYTES = 2 * 4 * 2 * 16 * 8
"""Of a block of two full layers, four tokens and two heads of 16 doubles."""


def offload_over(
    watch: ContentWatch,
    config: OffloadConfig,
    make: Callable[[HostCopies], Transport],
    clock: Callable[[], float] = time.monotonic,
) -> Connector:
    """Offload whose copies go through a transport of the test's.

    Args:
        make: from the `HostCopies` of a rank.
    """

    class Worker(OffloadWorker):
        def __init__(self, info: EngineInfo) -> None:
            super().__init__(info, config, self._transport_of)
            self._rank = info.rank

        def _transport_of(self, pools: Sequence[HostPool]) -> Transport:
            assert isinstance(self._copies, HostCopies)
            self._copies.allocate(pools)
            return watch.transport(self._rank, make(self._copies))

    return Connector(lambda info: OffloadScheduler(info, config, clock=clock), Worker)


def tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(61) for _ in range(count)]


def shaped(layers: Sequence[LayerConfig]) -> Model:
    """States are small enough for attention blocks of 8 tokens."""
    sizes = {"num_kv_heads": 4, "conv_kernel": 2} if RECURRENT in layers else {}
    return tiny(layers, **sizes)


def window(size: int) -> LayerConfig:
    return LayerConfig(kind="sliding_window", window=size)


class Bench:
    """A watched engine, with offload over scripted transports if asked for.

    Args:
        layers: of the model.
        fate: of each copy; None for no offload.
        host_blocks: size of host memory, in blocks of `BLOCK_BYTES`.
        right: how often drafts are right that no drafter with KV makes.
        drafter: whether one does.
        offload: further settings of the connector.
        move: executes a copy.
        transport: that ends them.
        clock: of engine and connector.
        changes: of `settings`.
    """

    def __init__(
        self,
        layers: Sequence[LayerConfig] = (FULL, FULL),
        *,
        fate: Callable[[CopyJob], Fate] | None = None,
        host_blocks: int = 4096,
        right: float | None = None,
        drafter: bool = False,
        offload: Mapping[str, Any] = MappingProxyType({}),
        move: Callable[[HostCopies, CopyJob], int] = HostCopies.execute,
        transport: type[FaultyTransport] = FaultyTransport,
        clock: Callable[[], float] = time.monotonic,
        **changes: Any,
    ) -> None:
        self.model = shaped(layers)
        config = settings(**changes)
        watch, connector, proposer = ContentWatch(), None, None
        self.transports: list[FaultyTransport] = []
        """One a rank."""
        if fate is not None:
            host = OffloadConfig(
                cpu_bytes_to_use=host_blocks * BLOCK_BYTES,
                **{"offload_prompt_only": False, **offload},
            )
            make = self._transport_of(fate, move, transport)
            connector = offload_over(watch, host, make, clock)
        if drafter:
            proposer = AttentionDrafter(random_draft_model(self.model), config)
        elif right is not None:
            proposer = Oracle(self.model, config.num_drafts, right)
        self.engine = ReferenceEngine(
            self.model,
            config,
            connector,
            drafter=proposer,
            clock=clock,
            content=watch,
        )
        self.pool = self.engine.manager.block_pool
        self.asked: dict[str, list[int]] = {}
        self.preemptions = 0
        """Seen by `finish`."""

    def _transport_of(
        self,
        fate: Callable[[CopyJob], Fate],
        move: Callable[[HostCopies, CopyJob], int],
        kind: type[FaultyTransport],
    ) -> Callable[[HostCopies], FaultyTransport]:
        def make(copies: HostCopies) -> FaultyTransport:
            transport = kind(lambda job: move(copies, job), fate)
            self.transports.append(transport)
            return transport

        return make

    @property
    def transport(self) -> FaultyTransport:
        """Of the first rank."""
        return self.transports[0]

    def add(self, prompt: list[int], max_tokens: int = 4, **more: Any) -> str:
        params = SamplingParams(max_tokens=max_tokens, **more.pop("params", {}))
        req_id = self.engine.add_request(prompt, params, **more)
        self.asked[req_id] = prompt
        return req_id

    def finish(self) -> None:
        """Run to the end, compare everything with the dense run, count the blocks."""
        self.preemptions += step_to_the_end(self.engine).preemptions
        asked, self.asked = self.asked, {}
        for req_id, prompt in asked.items():
            answer = self.engine.answers[req_id]
            if answer.finish_reason != "abort":
                compare(self.model, prompt, answer)
        assert_empty(self.engine)

    def ask(self, prompt: list[int], max_tokens: int = 4, **more: Any) -> int:
        """Serve one request; the tokens that it did not have to compute."""
        req_id = self.add(prompt, max_tokens, **more)
        self.finish()
        return self.engine.answers[req_id].num_cached_tokens

    def forget_local(self) -> None:
        assert self.engine.reset_prefix_cache(local_only=True)

    def jobs(self, *, store: bool) -> list[CopyJob]:
        return [job for job in self.transport.submitted if job.store == store]


def sources(jobs: Sequence[CopyJob]) -> list[int]:
    """Engine blocks of jobs, in order."""
    return [block for job in jobs for _, blocks, _ in job.parts for block in blocks]


def of_stores(fate: Fate) -> Callable[[CopyJob], Fate]:
    return lambda job: fate if job.store else COMPLETES


def of_loads(fate: Fate) -> Callable[[CopyJob], Fate]:
    return lambda job: COMPLETES if job.store else fate
