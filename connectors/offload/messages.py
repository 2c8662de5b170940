"""What the two halves say to each other, once a step at most."""

from typing import Final, Literal, TypeAlias

import msgspec

VERSION: Final = 2
"""Of these messages. Both halves come from one installation; a mixed one is refused."""

Version: TypeAlias = Literal[2]


class _Message(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True
):
    """Fields travel by position; a message with more or fewer is refused."""


class BlockPairs(_Message, frozen=True):
    """Blocks of one group: engine ids and host ids, pairwise."""

    group: int
    engine_ids: list[int]
    host_ids: list[int]


class CopyOrder(_Message, frozen=True):
    """One job: all its blocks arrive, or the job has failed."""

    id: int
    request_id: str
    parts: list[BlockPairs]
    refusal: str
    """Why it cannot be done: it ends at once, as failed, and nothing is copied. Empty:
    it can."""

    @property
    def engine_ids(self) -> list[int]:
        """All its engine blocks, in request order a group."""
        return [block for part in self.parts for block in part.engine_ids]


class HostPool(_Message, frozen=True):
    """Host blocks of one size, shared by groups."""

    groups: list[int]
    host_blocks: int
    """Host ids of these groups are 0..host_blocks-1."""


class Plan(_Message, frozen=True):
    """Scheduler half to every worker half, for one step."""

    version: Version
    step: int
    identity: str
    """Digest of what a stored block is (`kvplugin.connectors.identity`): a worker half
    that has another one refuses all orders."""
    pools: list[HostPool]
    """The same in every plan."""
    loads: list[CopyOrder]
    stores: list[CopyOrder]
    finished_sends: list[str]
    """Requests whose end the engine may now be told."""
    given_up: list[int]
    """Loads past their deadline. The worker half tells the engine that they failed,
    and reports their end when it comes."""


class Completion(_Message, frozen=True):
    """How a job ended on one rank."""

    id: int
    error: str
    nbytes: int
    seconds: float


class Report(_Message, frozen=True):
    """One worker half to the scheduler half."""

    version: Version
    rank: int
    step: int
    """Of the last plan this rank has executed; -1 if it was none."""
    completions: list[Completion]
