"""What hooks are told: one frozen object a call, so that signatures stay stable."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvplugin.block_pool import BlockPool
    from kvplugin.managers import ManagerSettings, SingleTypeKVCacheManager
    from kvplugin.parity import Parity
    from kvplugin.policies.eviction import EvictionPolicy
    from kvplugin.request import RequestLike
    from kvplugin.residency import ResidencySampler
    from kvplugin.spec import KVCacheConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionPolicyContext:
    """Which eviction policy is wanted, and for what."""

    name: str = ""
    """As in the configuration; empty for the default."""
    options: Mapping[str, object] = field(default_factory=dict)
    """As in the configuration; what the policy does not know must be refused."""
    inner: EvictionPolicy | None = None
    """Ranks what the wanted policy does not protect; None for the default. A policy
    that only ranks must refuse one."""
    num_blocks: int
    """Ids of the pool, the null block included; a guess while a configuration is
    only validated."""
    medium: str = "GPU"
    """What the blocks stand for, as in KV events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadPolicyContext:
    """Which offload policy is wanted, and for what."""

    name: str = ""
    """As in the configuration; empty for the default."""
    options: Mapping[str, object] = field(default_factory=dict)
    """As in the configuration; what the policy does not know must be refused."""
    num_blocks: int
    """Blocks that the tier holds; a guess while a configuration is only validated."""
    medium: str = "CPU"
    """The tier, as in KV events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPoolContext:
    """What the pool must offer."""

    num_blocks: int
    """Ids, the null block included."""
    policy: EvictionPolicy
    """Ranks keyed free blocks; not bound yet."""
    block_size: int = 0
    """Tokens of a block, for events."""
    enable_caching: bool = True
    """Whether blocks will be given keys."""
    enable_events: bool = False
    """Whether `take_events` will be asked."""
    medium: str = "GPU"
    """What the blocks stand for, as in KV events."""
    residency: ResidencySampler | None = None
    """Follows sampled blocks."""
    lineage: bool = False
    """Whether `info` will be asked, for blocks of a policy that does not need it."""
    parity: Parity | None = None
    """Behaviours of vLLM 0.19.1 to keep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorContext:
    """What a coordinator coordinates."""

    kv_cache_config: KVCacheConfig
    pool: BlockPool
    managers: Sequence[SingleTypeKVCacheManager]
    """One a group, in the order of the configuration; each knows its settings (model
    length, context parallel size, tokens of a hash)."""
    enable_caching: bool = True
    """Whether lookups can hit."""
    use_eagle: bool = False
    """Whether a draft model needs the last block of a hit computed again."""
    parity: Parity | None = None
    """Behaviours of vLLM 0.19.1 to keep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerContext:
    """What the manager of one group works with."""

    pool: BlockPool
    settings: ManagerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointContext:
    """A request about to be admitted whose state layers can keep checkpoints."""

    request: RequestLike
    group: int
    """Number of the group."""
    block_size: int
    """Tokens between two boundaries."""
    num_computed_tokens: int = 0
    """Tokens of the hit, of any source."""
    max_tokens: int
    """Tokens that the request may have in the end."""

    @property
    def boundaries(self) -> range:
        """Every token count at which a checkpoint can be kept."""
        return range(self.block_size, self.max_tokens + 1, self.block_size)


def _none(request: RequestLike) -> int:
    """Of a context that a test makes."""
    del request
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingContext:
    """Requests that wait for their blocks, in a step that may admit some."""

    waiting: tuple[RequestLike, ...]
    """In the order of the configured policy."""
    step: int
    """Its number, counting from 1."""
    free_blocks: int
    """Of the pool, evictable ones included; running requests have got theirs."""
    policy: str
    """The configured one: fcfs or priority."""
    cached_tokens: Callable[[RequestLike], int] = _none
    """Tokens of the engine's own cache that a request would start from now. A lookup
    that changes and counts nothing; costs as much as one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionContext:
    """A waiting request whose turn it is, while others run."""

    request: RequestLike
    step: int
    """Its number, counting from 1."""
    num_running: int
    """Requests that run, those admitted in this step included; 1 or more."""
    num_waiting: int
    """Requests that wait, this one included."""
    free_blocks: int
    """Of the pool now, evictable ones included."""
    num_blocks: int
    """Of the pool that can be handed out at all."""
    policy: str
    """The configured one: fcfs or priority."""
    cached_tokens: Callable[[RequestLike], int] = _none
    """See `WaitingContext`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VictimContext:
    """Blocks have run out, and a request that runs needs some."""

    needy: RequestLike
    """Needs blocks; stops for now if it is the victim itself."""
    candidates: tuple[RequestLike, ...]
    """All that run, `needy` included, in the order of their admission."""
    policy: str
    """The configured one: fcfs or priority."""
    freed_blocks: Callable[[RequestLike], int] = _none
    """Blocks that come free if a candidate loses its own: those that only it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreedContext:
    """What a request held when it was freed."""

    num_tokens: int
    """Prompt and output known by then."""
    num_blocks: tuple[int, ...]
    """Length of its block table, by group."""
