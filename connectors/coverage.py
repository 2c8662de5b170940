"""Which of a group's blocks a boundary needs, kind by kind.

A boundary of T tokens beyond a local hit of L tokens needs, of each group, one run of
blocks that ends at T. Block i is about the tokens from i times the block size on.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Final, Protocol

from kvplugin.contract import EngineInfo, GroupInfo, GroupKind
from kvplugin.errors import ConfigError
from kvplugin.spec import cdiv


class Coverage(Protocol):
    """One kind of group; all numbers in tokens but those of blocks."""

    dense: ClassVar[bool]
    """Whether every block is needed, and what lies behind a missing one is of no use.
    Only blocks of such groups are kept as chunks of several."""

    def begins(self, boundary: int) -> int:
        """First token whose KV the tokens from `boundary` on read, as far as it is
        kept token by token. Does not fall."""

    def first(self, local: int, boundary: int) -> int:
        """First block that `boundary` needs beyond a local hit of `local` tokens; the
        run ends before block boundary / block size, and is empty where it begins
        there. Falls with neither argument."""

    def alive(self, computed: int) -> int:
        """First block whose engine block is certainly still the request's during a
        step that computes the tokens from `computed` on."""

    def kept(self, longest: int, step: int) -> int:
        """Blocks to keep of a request of `longest` tokens, computed `step` a step."""


@dataclass(frozen=True, slots=True)
class Dense:
    """Every token reads all before it."""

    dense: ClassVar[bool] = True
    block_size: int

    def begins(self, boundary: int) -> int:
        del boundary
        return 0

    def first(self, local: int, boundary: int) -> int:
        del boundary
        return local // self.block_size

    def alive(self, computed: int) -> int:
        del computed
        return 0

    def kept(self, longest: int, step: int) -> int:
        del step
        return cdiv(longest, self.block_size)


@dataclass(frozen=True, slots=True)
class Recent:
    """A token reads those before it from some place on that moves along."""

    dense: ClassVar[bool] = False
    block_size: int
    begin: Callable[[int], int]
    """Where the token at this place begins to read; may be before the first one."""

    def begins(self, boundary: int) -> int:
        return max(self.begin(boundary), 0)

    def first(self, local: int, boundary: int) -> int:
        return max(local, self.begins(boundary)) // self.block_size

    def alive(self, computed: int) -> int:
        return self.first(0, computed)

    def kept(self, longest: int, step: int) -> int:
        del step
        return cdiv(longest, self.block_size)


@dataclass(frozen=True, slots=True)
class State:
    """A recurrent state: the one after the last token stands for all before."""

    dense: ClassVar[bool] = False
    block_size: int
    every_block: bool

    def begins(self, boundary: int) -> int:
        return boundary

    def first(self, local: int, boundary: int) -> int:
        return boundary // self.block_size - (boundary > local)

    def alive(self, computed: int) -> int:
        return computed // self.block_size

    def kept(self, longest: int, step: int) -> int:
        each = self.block_size if self.every_block else max(self.block_size, step)
        return cdiv(longest, each)


def _dense(group: GroupInfo) -> Coverage:
    return Dense(group.block_size)


def _window(group: GroupInfo) -> Coverage:
    """The `window` last tokens, its own included. Engines skip what lies before:
    `get_num_skipped_tokens` of vLLM 0.32's managers, with what they keep beside it for
    drafts."""
    reach = group.window - 1 + group.extra_history
    return Recent(group.block_size, lambda place: place - reach)


def _local_chunk(group: GroupInfo) -> Coverage:
    """Those of its own chunk of `window` tokens."""
    size = group.window
    return Recent(group.block_size, lambda place: place // size * size)


def _state(group: GroupInfo) -> Coverage:
    return State(group.block_size, group.state_every_block)


_OF_KIND: Final[dict[GroupKind, Callable[[GroupInfo], Coverage]]] = {
    GroupKind.FULL: _dense,
    GroupKind.MLA: _dense,
    GroupKind.SLIDING_WINDOW: _window,
    GroupKind.CHUNKED_LOCAL: _local_chunk,
    GroupKind.MAMBA: _state,
}
"""Kinds that connectors serve."""


def unserved(engine: EngineInfo) -> str:
    """Why a connector that finds blocks by their hashes leaves this model alone,
    naming the kinds; empty if it serves it."""
    groups = [group for group in engine.groups if group.reusable]
    if not groups:
        return "the model has no KV cache that could be found again"
    kinds = {group.kind for group in groups if group.kind not in _OF_KIND}
    if kinds:
        served = ", ".join(_OF_KIND)
        return (
            f"the model has a KV cache of kind {', '.join(sorted(kinds))}; those "
            f"served are {served}"
        )
    return ""


def coverage_of(group: GroupInfo) -> Coverage:
    """What boundaries need of a group.

    Raises:
        ConfigError: its kind is not served, or it has a window of no tokens.
    """
    make = _OF_KIND.get(group.kind)
    if make is None:
        raise ConfigError(
            f"no connector serves group {group.index}, which is of kind {group.kind}"
        )
    if make in (_window, _local_chunk) and group.window < 1:
        raise ConfigError(f"group {group.index} ({group.kind}) says no window")
    return make(group)
