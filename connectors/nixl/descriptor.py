"""What an engine tells others of itself at the handshake."""

from typing import Final, Literal, TypeAlias

import msgspec

from kvplugin.contract import GroupKind
from kvplugin.layout import KVLayout, Run, StatePart

FORMAT: Final = 1
Format: TypeAlias = Literal[1]


class _Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Named fields: refusals show them."""


class LayerMemory(_Struct, frozen=True):
    """One layer's blocks in a rank's memory."""

    name: str
    group: int
    """Index of its KV cache group."""
    address: int
    """What the offsets of `runs` and `rows` count from."""
    device: str
    page_bytes: int
    runs: list[Run]
    """The bytes of a block (`kvplugin.layout.block_runs`)."""
    dtype: str
    """Of the tensor's elements."""
    interior: str
    """`kvplugin.contract.KVTensor.interior`."""
    total_heads: int
    """`kvplugin.contract.KVTensor.total_heads`."""
    rows: KVLayout | None
    """Where rows lie; None if nobody knows: blocks can only be moved as they are."""
    state: list[StatePart]
    """`kvplugin.contract.KVTensor.state`, by place."""


class HostIdentity(_Struct, frozen=True):
    """Which process of which machine."""

    boot_id: str
    """Of the running kernel."""
    pid_namespace: int
    pid: int


class RankDescriptor(_Struct, frozen=True):
    """One rank: an introduction (`kvplugin.contract.IntroducesItself`)."""

    rank: int
    layers: list[LayerMemory]
    generations_address: int
    """Of an array of int64, one a block of the pool: its generation
    (`kvplugin.connectors.nixl.generations`). Entry 0, of the null block, is the
    process's own random number."""
    incarnation: int
    """That number, positive."""
    agent_metadata: bytes
    """NIXL's; empty where the rank is reached without NIXL only."""
    host: HostIdentity


class GroupDescriptor(_Struct, frozen=True):
    """One KV cache group (`kvplugin.contract.GroupInfo`)."""

    kind: GroupKind
    block_size: int
    window: int
    extra_history: int
    has_drafter: bool


class ModelDescriptor(_Struct, frozen=True):
    """What must be equal on both sides (`kvplugin.contract.ModelIdentity`)."""

    name: str
    revision: str
    dtype: str
    quantization: str
    weight_epoch: int


class EngineDescriptor(_Struct, frozen=True):
    """All that a peer needs to plan reads, or to say why it will not."""

    format: Format
    version: str
    """Of kvplugin."""
    engine_id: str
    model: ModelDescriptor
    num_blocks: int
    """Of the pool, the null block included."""
    tp_size: int
    groups: list[GroupDescriptor]
    layers: list[list[str]]
    """Names by group, over all ranks, sorted."""
    ranks: list[RankDescriptor]
    """By rank: pipeline rank times `tp_size`, plus tensor-parallel rank."""

    @property
    def peer_id(self) -> str:
        """This very process tree: a restarted engine has another."""
        return f"{self.engine_id}/{self.ranks[0].incarnation:x}"
