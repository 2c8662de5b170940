"""What is replayed, and under which rules."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from kvplugin.errors import ConfigError, check_count, unknown_name

LRU: Final = "lru"
BELADY: Final = "belady"
"""Not for engines: it knows the trace."""

Progress = Callable[[str, int, int], None]
"""Told (what runs, how much is done, how much there is) now and then."""

Partial = Literal["count", "drop"]
Semantics = Literal["chained", "flat"]

FORMATS: Final = ("kvplugin", "mooncake", "bailian", "vllm-events")
"""Formats of traces: our recorder's, and others'."""

PARTIALS: Final[tuple[Partial, ...]] = ("count", "drop")
SEMANTICS: Final[tuple[Semantics, ...]] = ("chained", "flat")


_CHAINED_ONLY: Final = (
    "block_size", "warmup", "running", "lookahead", "model", "host_capacity"
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ReplaySettings:
    """Rules of a replay; every result prints them."""

    policies: tuple[str, ...] = ("lru",)
    """Names as in `eviction_policy`, such as ``retention+arc``."""
    policy_options: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Options by such a name."""
    capacities: tuple[int, ...]
    """Usable blocks of the pool, that all groups share."""
    block_size: int | None = None
    """Tokens of a block; None takes the trace's."""
    partial: Partial = "count"
    """Whether the partial block at the end of a prompt is a block."""
    warmup: float = 0.0
    """Share of the requests, 0 to below 1, that run before counting begins."""
    running: int = 0
    """Requests that keep their blocks while later ones run."""
    lookahead: int = 0
    """Waiting requests whose keys the policy is told."""
    model: str | None = None
    """A model of `kvplugin.plan`, or a config.json, whose groups are served; None:
    one group of full attention."""
    host_capacity: int = 0
    """Blocks of a host tier, 0 for none."""
    host_policy: str = "lru"
    """Eviction policy of the host tier."""
    semantics: Semantics = "chained"
    """``flat``: ids are independent keys, for comparison with cache simulators."""
    references: bool = True
    """Whether LRU, Belady and the unbounded cache run too."""

    def __post_init__(self) -> None:
        """Refuse what cannot be.

        Raises:
            ConfigError: naming the setting.
        """
        if not self.policies:
            raise ConfigError("policy names no eviction policy")
        if not self.capacities:
            raise ConfigError("capacity names no number of blocks")
        for capacity in self.capacities:
            check_count("capacity", capacity, 1)
        for name in ("running", "lookahead", "host_capacity"):
            check_count(name, getattr(self, name), 0)
        if self.block_size is not None:
            check_count("block_size", self.block_size, 1)
        for what, value, known in (
            ("partial", self.partial, PARTIALS),
            ("semantics", self.semantics, SEMANTICS),
        ):
            if value not in known:
                raise unknown_name("value", value, known, what)
        if not 0 <= self.warmup < 1:
            raise ConfigError(f"warmup={self.warmup} must be from 0 to below 1")
        for name in self.policy_options:
            if name not in self.policies:
                raise unknown_name("policy", name, self.policies, "policy_options")
        if self.semantics == "flat":
            self._check_flat()

    @property
    def reference_policies(self) -> tuple[str, ...]:
        """Policies that run for comparison only."""
        if not self.references:
            return ()
        return tuple(name for name in (LRU, BELADY) if name not in self.policies)

    def _check_flat(self) -> None:
        chained_only = {
            name: getattr(self, name) for name in _CHAINED_ONLY if getattr(self, name)
        }
        if chained_only:
            raise ConfigError(
                f"semantics='flat' has neither requests nor groups: leave out "
                f"{', '.join(chained_only)}"
            )
