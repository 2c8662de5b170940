"""A peer as one rank of ours sees it: what is agreed, and what reads its memory."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from kvplugin.connectors.negotiate import pair_rank
from kvplugin.connectors.nixl.agent import HOST, Area
from kvplugin.connectors.nixl.descriptor import EngineDescriptor
from kvplugin.connectors.nixl.messages import GroupRead, ReadOrder
from kvplugin.connectors.nixl.rank_memory import RankMemory
from kvplugin.connectors.nixl.readers import MakeReaders, Read
from kvplugin.connectors.nixl.reads import (
    Batch,
    ReadPlanner,
    StagedConversion,
    Transfer,
)
from kvplugin.connectors.nixl.staging import Slice
from kvplugin.contract import GroupKind
from kvplugin.errors import TransferError
from kvplugin.kernels.dispatch import Converter, block_converter
from kvplugin.spec import cdiv

CHECK_ENTRIES: Final = 8192
"""Generations that are read at once."""

_ENTRY_BYTES: Final = 8


class Connection:
    """Made, used and closed by the peer's thread.

    Args:
        memory: this rank's.
        peer: the engine to read from.
        make_readers: what reads its ranks.
        in_flight: orders that may be under way at once.

    Raises:
        LayoutMismatchError: its KV can't be read into ours.
        TransferError: a rank of it can't be reached.
    """

    def __init__(
        self,
        memory: RankMemory,
        peer: EngineDescriptor,
        make_readers: MakeReaders,
        in_flight: int,
    ) -> None:
        self._memory = memory
        self._peer = peer
        self._pairings = pair_rank(memory.own, memory.rank, peer)
        self._planners: dict[int, ReadPlanner] = {}
        self._converters: dict[int, list[Converter]] = {}
        ranks = sorted({pairing.remote_rank for pairing in self._pairings})
        self._readers = make_readers(memory.rank, peer, ranks)
        self._found = np.zeros((in_flight, CHECK_ENTRIES), np.int64)
        self._places = list(range(in_flight))
        self._registered: list[Any] = []
        if memory.agent is not None:
            area = Area(self._found.ctypes.data, self._found.nbytes, HOST)
            self._registered = memory.agent.register([area])

    def close(self) -> None:
        """Let go of the peer; no read of it is under way."""
        for reader in self._readers.values():
            reader.close()
        if self._memory.agent is not None:
            self._memory.agent.deregister(self._registered)

    # -- plans ---------------------------------------------------------------------

    def check(self, order: ReadOrder) -> None:
        """Refuse what the peer's blocks can't be asked for, or ours can't hold.

        Raises:
            TransferError: naming it.
        """
        for part in order.parts:
            self._check_rows(part)
        blocks = {block for part in order.parts for block in part.remote_ids}
        for block in blocks:
            if not 0 < block < self._peer.num_blocks:
                raise TransferError(
                    f"block {block} is none that the peer can hand over: it has "
                    f"blocks 1 to {self._peer.num_blocks - 1}"
                )
        if missing := blocks - dict(order.generations).keys():
            raise TransferError(f"no generation was named for block {min(missing)}")

    def _check_rows(self, part: GroupRead) -> None:
        groups = self._memory.own.groups, self._peer.groups
        if not 0 <= part.group < min(map(len, groups)):
            raise TransferError(f"there is no group {part.group}")
        if not 0 <= part.first_token < part.end_token:
            raise TransferError(
                f"tokens {part.first_token} to {part.end_token} of group {part.group}"
            )
        for side, ids in zip(groups, (part.local_ids, part.remote_ids), strict=True):
            group = side[part.group]
            size = group.block_size
            wanted = cdiv(part.end_token, size) - part.first_token // size
            if group.kind is GroupKind.MAMBA:
                wanted = 1
            if len(ids) != wanted:
                raise TransferError(
                    f"{len(ids)} blocks of {size} tokens do not hold tokens "
                    f"{part.first_token} to {part.end_token} of group {part.group}"
                )

    def plan(self, order: ReadOrder, staging: Slice) -> list[Batch]:
        """What is to be read, staged in this slice where it has to be.

        Raises:
            KVPluginError: the order asks for what there isn't.
        """
        planner = self._planners.get(staging.number)
        if planner is None:
            planner = ReadPlanner(
                self._pairings,
                staging.address,
                staging.nbytes,
                stage_pages=any(r.minds_pieces for r in self._readers.values()),
            )
            self._planners[staging.number] = planner
        return planner.plan(order)

    def convert(self, conversions: Sequence[StagedConversion], staging: Slice) -> None:
        """Carry what has arrived in the slice to where it belongs."""
        converters = self._converters.get(staging.number)
        if converters is None:
            converters = [
                block_converter(*places, self._memory.staging.device)
                for places in self._planners[staging.number].converters
            ]
            self._converters[staging.number] = converters

        def work() -> None:
            for part in conversions:
                converters[part.converter].convert(
                    part.source_chunks, part.target_chunks
                )

        if conversions:
            self._memory.staging.on_device(work)

    # -- reads ---------------------------------------------------------------------

    def begin(self, transfer: Transfer) -> Read:
        """Start to read.

        Raises:
            TransferError: it did not start.
        """
        return self._readers[transfer.remote_rank].begin(transfer)

    # -- generations ---------------------------------------------------------------

    def take_place(self) -> int:
        """Where one order's generations are read to, for `give_back`."""
        return self._places.pop()

    def give_back(self, place: int) -> None:
        """Another order may have it."""
        self._places.append(place)

    def checks(
        self, order: ReadOrder, ranks: Sequence[int], place: int
    ) -> Iterator["Check"]:
        """What must be found in the peer's arrays after the bytes have arrived."""
        generations = sorted(dict(order.generations).items())
        step = CHECK_ENTRIES - 1
        for rank in ranks:
            for start in range(0, max(len(generations), 1), step):
                entries = [
                    (0, self._peer.ranks[rank].incarnation),
                    *generations[start : start + step],
                ]
                yield Check(
                    rank,
                    self._peer.ranks[rank].generations_address,
                    np.array(entries, np.int64).reshape(-1, 2),
                    self._found[place],
                )


class Check:
    """Entries of one rank's array that are read and compared.

    Args:
        rank: the peer's.
        address: of its array.
        entries: int64 [n, 2]: ascending place, what must be there.
        found: where they are read to, at least n int64.
    """

    def __init__(
        self,
        rank: int,
        address: int,
        entries: "np.ndarray[Any, Any]",
        found: "np.ndarray[Any, Any]",
    ) -> None:
        self._entries = entries
        self._found = found[: len(entries)]
        self._found[:] = -1
        self.transfer = self._transfer(rank, address)

    def _transfer(self, rank: int, address: int) -> Transfer:
        """Neighbouring entries are read as one piece."""
        places = self._entries[:, 0]
        starts = np.flatnonzero(np.diff(places, prepend=-2) != 1)
        counts = np.diff(starts, append=len(places))
        return Transfer(
            remote_rank=rank,
            remote=address + places[starts] * _ENTRY_BYTES,
            local=self._found.ctypes.data + starts * _ENTRY_BYTES,
            nbytes=counts * _ENTRY_BYTES,
            remote_device=HOST,
            local_device=HOST,
        )

    def difference(self) -> str:
        """How what was read differs from what must be there; empty if it does not."""
        wrong = np.flatnonzero(self._found != self._entries[:, 1])
        if not len(wrong):
            return ""
        place, wanted = map(int, self._entries[wrong[0]])
        if place == 0:
            return "the peer's process has been replaced"
        return (
            f"the peer's lease was over: block {place} is in generation "
            f"{int(self._found[wrong[0]])}, not {wanted} (and {len(wrong) - 1} more "
            "blocks)"
        )
