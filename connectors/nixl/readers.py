"""What reads another rank's memory, and which way.

There are two ways: NIXL, over any network that it knows, and the kernel's own, from
process to process on one machine (`same_host`). Each peer has a thread of its own that
calls them (`read_thread`); nothing here is called from two threads at once.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

from kvplugin.connectors.nixl.agent import NixlAgent
from kvplugin.connectors.nixl.config import NixlConfig
from kvplugin.connectors.nixl.descriptor import EngineDescriptor, RankDescriptor
from kvplugin.connectors.nixl.nixl_reader import NixlReader
from kvplugin.connectors.nixl.reads import Transfer
from kvplugin.connectors.nixl.same_host import HostReader, why_not
from kvplugin.errors import TransferError

logger = logging.getLogger("vllm.kvplugin.nixl")


class Read(Protocol):
    """A transfer under way."""

    @property
    def is_prompt(self) -> bool:
        """Whether `poll` itself moves bytes: the next one need not wait."""

    def poll(self) -> bool:
        """Whether all bytes are there.

        Raises:
            TransferError: they won't come. From then on nothing is written.
        """

    def stop(self) -> None:
        """Nobody wants the bytes: end as early as may be. Where that is not possible
        it goes on until it ends, and is to be polled until then."""


class Reader(Protocol):
    """Reads one rank's memory."""

    @property
    def minds_pieces(self) -> bool:
        """Whether a small piece costs it more than copying its bytes once more."""

    def begin(self, transfer: Transfer) -> Read:
        """Start a read.

        Raises:
            TransferError: it did not start, and nothing is written.
        """

    def close(self) -> None:
        """Let go of the rank; no read of it is under way."""


MakeReaders: TypeAlias = Callable[
    [RankDescriptor, EngineDescriptor, Sequence[int]], Mapping[int, Reader]
]
"""Readers by rank, from our rank, an engine, and the ranks of it that are read."""


class ReaderChoice:
    """A `MakeReaders`: the kernel's way where it works, NIXL elsewhere.

    Args:
        config: the connector's configuration.
        agent: NIXL's; None reaches only what the kernel reaches.
    """

    def __init__(self, config: NixlConfig, agent: NixlAgent | None) -> None:
        self._same_host = config.same_host == "auto"
        self._agent = agent

    def __call__(
        self, ours: RankDescriptor, engine: EngineDescriptor, ranks: Sequence[int]
    ) -> dict[int, Reader]:
        """As `MakeReaders` says.

        Raises:
            TransferError: a rank can't be reached.
        """
        readers: dict[int, Reader] = {}
        try:
            for rank in ranks:
                readers[rank] = self._open(ours, engine.ranks[rank], engine.peer_id)
        except TransferError:
            for reader in readers.values():
                reader.close()
            raise
        return readers

    def _open(
        self, ours: RankDescriptor, theirs: RankDescriptor, peer_id: str
    ) -> Reader:
        why = why_not(ours, theirs) if self._same_host else "same_host is off"
        if not why:
            way, reader = "process to process", HostReader(theirs)
            logger.info("reads from %s, rank %d: %s", peer_id, theirs.rank, way)
            return reader
        if self._agent is None or not theirs.agent_metadata:
            whose = "this engine" if self._agent is None else "the peer"
            raise TransferError(
                f"rank {theirs.rank} of {peer_id} can't be read: not within the "
                f"machine ({why}), and {whose} has no NIXL backends (key backends)"
            )
        logger.info("reads from %s, rank %d: NIXL (%s)", peer_id, theirs.rank, why)
        return NixlReader(self._agent, theirs)
