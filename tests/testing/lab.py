"""A laboratory whose connector is a remote that has any prefix it claims."""

from collections.abc import Callable, Sequence
from typing import Any

from kvplugin.contract import CopyJob, Transport, WorkerHalf
from kvplugin.spec import KVCacheSpec
from kvplugin.testing import FakeTransport, Fate, RemoteKV, RemoteWorker
from kvplugin.testing import Lab as PublicLab
from tests.core.manager_setups import FORMAT


class Lab(PublicLab):
    """Two halves of a connector, an engine that computes with toys, and a clock.

    Args:
        specs: one a group.
        usable: blocks of the pool.
        held: whether loads end only when a test says so.
        synchronous: external tokens count as computed at admission.
        settings: further ones of `kvplugin.testing.Lab`.
    """

    def __init__(
        self,
        specs: Sequence[KVCacheSpec],
        usable: int,
        *,
        held: bool = True,
        synchronous: bool = False,
        **settings: Any,
    ) -> None:
        self._held, self._synchronous = held, synchronous
        super().__init__(
            specs, usable, synchronous=synchronous, hash_format=FORMAT, **settings
        )

    def make_remote(self) -> RemoteKV:
        """The scheduler half."""
        return RemoteKV()

    def make_connector(self) -> RemoteKV:
        self.invalid: list[set[int]] = []
        """Blocks of synchronous loads that failed, as named."""
        self.remote = self.make_remote()
        return self.remote

    def make_transport(self, fate_of: Callable[[CopyJob], Fate]) -> FakeTransport:
        del fate_of
        return FakeTransport(self.remote.execute(self.memory), held=self._held)

    def make_workers(
        self, make_worker: Callable[[Transport], WorkerHalf] | None
    ) -> list[WorkerHalf]:
        del make_worker
        self.worker = RemoteWorker(
            self.remote,
            self.memory,
            self.transport,
            synchronous=self._synchronous,
            on_invalid=self._hear_invalid,
        )
        return [self.worker]

    def _hear_invalid(self, blocks: list[int]) -> None:
        self.invalid.append(set(blocks))
        self.model.invalid_block_ids.update(blocks)

    def add(
        self, prompt: Sequence[int], n: int, *, remote_tokens: int = 0, **settings: Any
    ) -> str:
        """A request arrives, of whose prefix the remote has so many tokens; its id."""
        id_ = super().add(prompt, n, **settings)
        self.remote.offers[id_] = remote_tokens
        return id_
