"""What is replayed, and under which rules."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Final, Literal

from kvplugin.errors import ConfigError, check_count, unknown_name

LRU: Final = "lru"
BELADY: Final = "belady"
"""Not for engines: it knows the trace."""

Progress = Callable[[str, int, int], None]
"""Told (what runs, how much is done, how much there is) now and then."""

Partial = Literal["count", "drop"]
Semantics = Literal["chained", "flat"]
References = Literal["all", "lru", "none"]

FORMATS: Final = ("kvplugin", "mooncake", "bailian", "vllm-events")
"""Formats of traces: our recorder's, and others'."""

PARTIALS: Final[tuple[Partial, ...]] = ("count", "drop")
SEMANTICS: Final[tuple[Semantics, ...]] = ("chained", "flat")

REFERENCES: Final[Mapping[References, tuple[str, ...]]] = {
    "all": (LRU, BELADY),
    "lru": (LRU,),
    "none": (),
}
"""Policies that run for comparison; the unbounded cache is with all but ``none``."""

_FLAT: Final = (
    "policies", "policy_options", "capacities", "semantics", "references"
)  # fmt: skip
"""Settings that make a difference to independent keys."""


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
    host_policy: str | None = None
    """Eviction policy of the host tier; None takes LRU."""
    semantics: Semantics = "chained"
    """``flat``: ids are independent keys, for comparison with cache simulators."""
    references: References = "all"
    """What else runs: LRU, Belady and the unbounded cache; without Belady; nothing."""

    def __post_init__(self) -> None:
        """Refuse what cannot be.

        Raises:
            ConfigError: naming the setting.
        """
        _check_list("policy", self.policies, "eviction policies")
        for policy in self.policies:
            _check_name("policy", policy)
        _check_list("capacity", self.capacities, "numbers of blocks")
        for capacity in self.capacities:
            check_count("capacity", capacity, 1)
        for name in ("running", "lookahead", "host_capacity"):
            check_count(name, getattr(self, name), 0)
        if self.block_size is not None:
            check_count("block_size", self.block_size, 1)
        for what, value, known in (
            ("partial", self.partial, PARTIALS),
            ("semantics", self.semantics, SEMANTICS),
            ("references", self.references, REFERENCES),
        ):
            if value not in tuple(known):
                raise unknown_name("value", str(value), known, what)
        number = isinstance(self.warmup, int | float)
        if not number or not 0 <= self.warmup < 1:
            raise ConfigError(f"warmup={self.warmup!r} must be from 0 to below 1")
        for name in ("model", "host_policy"):
            if getattr(self, name) is not None:
                _check_name(name, getattr(self, name))
        self._check_options()
        if self.host_policy is not None and not self.host_capacity:
            raise ConfigError(
                f"host_policy={self.host_policy!r} needs a host_capacity of 1 at least"
            )
        if self.semantics == "flat":
            self._check_flat()

    @property
    def reference_policies(self) -> tuple[str, ...]:
        """Policies that run for comparison only."""
        names = REFERENCES[self.references]
        return tuple(name for name in names if name not in self.policies)

    def _check_options(self) -> None:
        tables = self.policy_options
        if not isinstance(tables, Mapping) or not all(
            isinstance(table, Mapping) for table in tables.values()
        ):
            raise ConfigError(
                f"policy_options={tables!r} must have a table of options a policy"
            )
        for name in tables:
            if name not in self.policies:
                raise unknown_name("policy", str(name), self.policies, "policy_options")

    def _check_flat(self) -> None:
        chained_only = [
            each.name
            for each in fields(self)
            if each.name not in _FLAT and getattr(self, each.name) != each.default
        ]
        if chained_only:
            raise ConfigError(
                f"semantics='flat' has neither requests nor groups: leave out "
                f"{', '.join(chained_only)}"
            )


def _check_list(name: str, values: object, what: str) -> None:
    if not isinstance(values, tuple | list):
        raise ConfigError(f"{name}={values!r} must be a tuple, of {what}")
    if not values:
        raise ConfigError(f"{name} names no {what}")


def _check_name(name: str, value: object) -> None:
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{name}={value!r} must be a name")
