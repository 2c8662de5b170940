"""The laboratory with offload in it: the real scheduler and both real halves.

    lab = HybridLab(MIXES["full+window"])
    lab.serve(range(40))                     # computed, and stored
    lab.forget_local()
    lab.hold()
    id_ = lab.add(range(40), 3)              # asks host memory
    lab.step()
    lab.transports[0].complete(...)
    lab.drain()                              # everything ends, and is judged

Time stands still but for a little in each step.
"""

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

from kvplugin.connectors.offload.config import OffloadConfig
from kvplugin.connectors.offload.messages import HostPool
from kvplugin.connectors.offload.scheduler import OffloadScheduler
from kvplugin.connectors.offload.worker import OffloadWorker
from kvplugin.contract import CopyJob, Lookup, Transport, WorkerHalf
from kvplugin.request import Request
from kvplugin.spec import KVCacheConfig
from kvplugin.testing import ContentModel, FakeTransport, Fate, Lab
from kvplugin.testing.lab import BUDGET
from kvplugin.testing.rules import group_models
from tests.core.manager_setups import FORMAT
from tests.offload.hybrid_account import Account
from tests.offload.hybrid_host_content import assert_host_content
from tests.offload.hybrid_memory import HostMemory, Ranks
from tests.offload.hybrid_mixes import Mix
from tests.offload.hybrid_witness import Witness, WorkerWitness

STEP_SECONDS: Final = 0.01
FOREVER: Final = 86_400.0


class HybridLab(Lab):
    """An engine with offload.

    Args:
        mix: the model.
        usable: blocks of the pool; the mix's if None.
        ranks: worker halves.
        host: longest requests that fit into host memory, about.
        max_model_len: tokens of the longest request.
        budget: tokens of a step.
        offload: settings of the connector beside the size of host memory.
        engine: further fields of `EngineInfo`.
        settings: further ones of `Lab`.
    """

    def __init__(
        self,
        mix: Mix,
        *,
        usable: int | None = None,
        ranks: int = 1,
        host: float = 2,
        max_model_len: int = 128,
        budget: int = BUDGET,
        offload: dict[str, Any] | None = None,
        engine: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self.mix, self.num_ranks, self.budget = mix, ranks, budget
        self.engine = mix.info(
            num_blocks=1 + (usable or mix.usable),
            world_size=ranks,
            max_model_len=max_model_len,
            max_step_tokens=budget,
            **(engine or {}),
        )
        longest = sum(
            -(-max_model_len // group.block_size) * group.block_bytes
            for group in self.engine.groups
        )
        self.config = OffloadConfig(
            cpu_bytes_to_use=max(int(host * longest * ranks), 1), **(offload or {})
        )
        super().__init__(
            mix.specs(mix.drafts),
            usable or mix.usable,
            ranks=ranks,
            drafts=mix.drafts,
            lookahead=mix.drafts,
            rereads=mix.rereads,
            caching=mix.caching,
            max_model_len=max_model_len,
            hash_format=FORMAT,
            max_num_batched_tokens=budget,
            **({"load_timeout_s": FOREVER, "max_overdue_fraction": 1.0} | settings),
        )

    def make_memory(self, config: KVCacheConfig) -> ContentModel:
        self.ranks = Ranks(group_models(config), self.kv.block_pool, self.num_ranks)
        return self.ranks

    def make_connector(self) -> Witness:
        half = OffloadScheduler(
            self.engine, self.config, clock=lambda: self.now, enable_events=True
        )
        self.account = Account(half)
        self.half, self.witness = half, Witness(half, self.engine.groups)
        return self.witness

    def make_transport(self, fate_of: Callable[[CopyJob], Fate]) -> FakeTransport:
        del fate_of
        self.hosts = [HostMemory(m, self.awaits_load) for m in self.ranks.ranks]
        self.transports = [FakeTransport(host.execute) for host in self.hosts]
        return self.transports[0]

    def make_workers(
        self, make_worker: Callable[[Transport], WorkerHalf] | None
    ) -> list[WorkerHalf]:
        del make_worker
        self.workers = [
            WorkerWitness(
                OffloadWorker(
                    replace(self.engine, rank=rank), self.config, self._opens(rank)
                ),
                self.witness.loads,
            )
            for rank in range(self.num_ranks)
        ]
        return list(self.workers)

    def _opens(self, rank: int) -> Callable[[Sequence[HostPool]], Transport]:
        def open_host_memory(pools: Sequence[HostPool]) -> Transport:
            self.hosts[rank].open(pools)
            return self.transports[rank]

        return open_host_memory

    # -- what may happen -----------------------------------------------------------

    def step(self) -> None:
        """One step; time goes on a little."""
        super().step()
        self.account.take()
        self.now += STEP_SECONDS

    def steps(self, count: int) -> None:
        """That many steps, work or not."""
        for _ in range(count):
            self.step()

    def run(self, limit: int = 0) -> None:
        """Steps until nothing is left to do.

        Raises:
            AssertionError: there still is after `limit` steps, or after more than all
                requests can need.
        """
        left = sum(
            e.request.num_tokens + e.max_tokens
            for e in self.scheduler.requests.values()
        )
        for _ in range(limit or 400 + 8 * left):
            if not self.scheduler.has_work():
                return
            self.step()
        raise AssertionError(f"no end in sight: {self.state()}")

    def serve(self, prompt: Iterable[int], n: int = 1, **attributes: Any) -> str:
        """A request from arrival to end, transfers included; its id."""
        id_ = self.add(list(prompt), n, **attributes)
        self.run()
        return id_

    def forget_local(self) -> None:
        """Lose the engine's own prefix cache, so that only host memory hits."""
        self.kv.evict_blocks(range(1, self.kv.block_pool.num_blocks))

    def hold(self) -> None:
        """From now on a job ends only when the test says so."""
        for transport in self.transports:
            transport.held = True

    def let_go(self) -> None:
        """From now on jobs end as soon as anybody asks; those held as well."""
        for transport in self.transports:
            transport.release()

    def pending(self, *, store: bool) -> list[CopyJob]:
        """Jobs under way on the first rank, oldest first."""
        return [job for job in self.transports[0].pending if job.store is store]

    def jobs(self, *, store: bool) -> list[CopyJob]:
        """Jobs that the first rank has ever begun, oldest first."""
        return [job for job in self.transports[0].submitted if job.store is store]

    def complete(self, *jobs: CopyJob) -> None:
        """End jobs well on every rank."""
        for transport in self.transports:
            for job in jobs:
                transport.complete(job.id)

    def fail(self, *jobs: CopyJob) -> None:
        """End jobs badly on every rank, without a byte moved."""
        for transport in self.transports:
            for job in jobs:
                transport.fail(job.id)

    # -- questions -----------------------------------------------------------------

    def offered(self, prompt: Iterable[int], **attributes: Any) -> Lookup:
        """What host memory has for a request with this prompt."""
        request = self.request_of(prompt, **attributes)
        answer = self.witness.lookup(request, 0)
        assert not self.witness.finished(request)
        return answer

    def request_of(self, prompt: Iterable[int], **attributes: Any) -> Request:
        """One that the engine does not know."""
        return Request(
            "question",
            list(prompt),
            hash_format=FORMAT,
            hash_block_size=self.hash_size,
            **attributes,
        )

    def awaits_load(self, block: int) -> bool:
        """Whether a load under way is to fill this block."""
        loads = self.scheduler._roster.loads._loads.values()
        return block in self._given_up or any(block in ld.to_fill for ld in loads)

    @property
    def _given_up(self) -> set[int]:
        """Blocks of loads that nobody waits for, which the connector references."""
        return set(self._taken)

    @property
    def blocks_per_chunk(self) -> int:
        """Of dense groups."""
        return self.config.blocks_per_chunk

    @property
    def num_credited(self) -> int:
        """Tokens that loads were to bring, of all requests."""
        return sum(map(sum, self.witness.credited.values()))

    # -- what must hold ------------------------------------------------------------

    def drain(self) -> None:
        """Let everything end, and judge it."""
        self.let_go()
        self.run()
        self.steps(2)
        super().drain()
        assert_host_content(self)
        self.account.check_idle(self.num_credited, self.witness.loads.total())
        self.check_idle()

    def check_idle(self) -> None:
        """What holds once all has ended: nothing is held, nobody is remembered."""
        assert not self.half.has_pending_work()
        assert not self.half.has_pending_frees()
        assert not list(self.half.watched)
        for worker in self.workers:
            worker.check_idle()
        if self.witness.views:
            gc.collect()  # or a cycle keeps them
        remembered = [view.request_id for view in self.witness.views]
        assert not remembered, f"the connector remembers {remembered}"
