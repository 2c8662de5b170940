"""What the two halves say to each other, once a step at most."""

from typing import Final, Literal, TypeAlias

import msgspec

VERSION: Final = 1
Version: TypeAlias = Literal[1]


class _Message(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True
):
    """Fields travel by position; a message with more or fewer is refused."""


class Peer(_Message, frozen=True):
    """An engine that reads may name from now on."""

    peer_id: str
    descriptor: bytes
    """A `kvplugin.connectors.nixl.descriptor.EngineDescriptor`, encoded."""


class GroupRead(_Message, frozen=True):
    """Tokens of one group, [first_token, end_token), from the peer's blocks into ours.

    Each row begins with the block that holds `first_token` and ends with the one that
    holds the token before `end_token`, in that side's block size. Of a group of states
    it is one block a side: the state after `end_token` tokens.
    """

    group: int
    first_token: int
    end_token: int
    remote_ids: list[int]
    local_ids: list[int]


class ReadOrder(_Message, frozen=True):
    """One read: all of it arrives and is verified, or it has failed."""

    id: int
    request_id: str
    peer_id: str
    parts: list[GroupRead]
    generations: list[tuple[int, int]]
    """(block of the peer, its generation) for every block of `parts`: what the peer's
    array must hold after the bytes have arrived, on each of its ranks that was read."""
    refusal: str = ""
    """Not empty: it cannot be read, and counts as failed; its parts then name blocks
    of ours only."""

    @property
    def engine_ids(self) -> list[int]:
        """All blocks of ours that it fills."""
        return [block for part in self.parts for block in part.local_ids]


class Plan(_Message, frozen=True):
    """Scheduler half to every worker half, for one step."""

    version: Version
    step: int
    new_peers: list[Peer]
    """Before their first read."""
    gone_peers: list[str]
    """Nobody reads from them any more; reads under way go on until they end."""
    reads: list[ReadOrder]
    given_up: list[int]
    """Reads past their deadline: the engine is told that they failed, and their end is
    reported when it comes."""
    generations: list[tuple[int, int]]
    """(block of ours, its generation from now on). Set before `finished_sends` are
    announced, so before their blocks can be used again."""
    finished_sends: list[str]
    """Requests whose lease is over."""
    is_idle: bool
    """The step computes nothing: it may wait for reads."""


class Completion(_Message, frozen=True):
    """How a read ended on one rank; said once."""

    id: int
    error: str
    """Empty: every byte is there, and was valid after it had been read."""
    nbytes: int
    seconds: float
    """From its start to its end."""
    discarded: bool
    """The generations had changed: the peer's lease was over."""


class Report(_Message, frozen=True):
    """One worker half to the scheduler half."""

    version: Version
    rank: int
    step: int
    """Of the last plan this rank has executed; -1 if it was none."""
    completions: list[Completion]
