"""Which layout the KV cache of an engine has, and who decided it.

One layout holds for all layers. It is asked for, in this order, by an override in the
code, by the environment (``VLLM_KV_CACHE_LAYOUT``), by connectors; otherwise it is NHD
(vLLM 0.19.1 `get_kv_cache_layout`). Unlike there, it has to be one that every backend
reads and that no connector's requirement contradicts: who expects heads and gets
tokens sends wrong bytes. What a connector merely prefers never ends the start.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kvplugin.errors import ConfigError
from kvplugin.worker.backends import (
    LAYOUTS,
    BackendLayout,
    canonical_layout,
    is_block_compact,
    is_cross_layer,
)

logger = logging.getLogger("vllm.kvplugin.worker")

ENVIRONMENT_KEY: Final = "VLLM_KV_CACHE_LAYOUT"


class Decider(StrEnum):
    """Who may decide, first to last."""

    OVERRIDE = "override"
    ENVIRONMENT = "environment"
    CONNECTOR = "connector"
    DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class LayoutWish:
    """What a connector asks for."""

    connector: str
    layout: str | None
    """None: it takes any."""
    required: bool = True
    """False: another layout serves too, only less well. The first such wish that suits
    decides if nobody else does; those that lose are logged."""


@dataclass(frozen=True, slots=True)
class LayoutChoice:
    """The layout, and why it is this one."""

    layout: str
    decided_by: Decider
    candidates: tuple[str, ...]
    """Layouts that every backend reads, preferred ones first."""


def choose_layout(
    backends: Mapping[str, BackendLayout],
    *,
    override: str | None = None,
    environment: Mapping[str, str] | None = None,
    wishes: Sequence[LayoutWish] = (),
    cross_layer: bool = False,
    one_kind: bool = False,
    mixed_pages: bool = False,
) -> LayoutChoice:
    """Choose the layout of all layers.

    Args:
        backends: attention layer -> its backend.
        override: what the code asks for.
        environment: None for the process's own.
        wishes: what each connector asks for.
        cross_layer: the layers of a block are to lie together; ``NHD`` and ``HND``
            then mean BLNHC and BHLNC.
        one_kind: there is one group of layers with one spec and one backend, so that
            they may lie together if somebody names such a layout.
        mixed_pages: layers of different shapes share memory: only layouts whose
            blocks are one run will do.

    Raises:
        ConfigError: no layout suits all backends, an unknown name, one that does not
            suit them, connectors whose requirements disagree, or a requirement that
            override or environment contradict. Says who asked for what, and what to
            change.
    """
    suitable = _suitable(cross_layer, one_kind, mixed_pages)
    candidates = _candidates(backends, suitable)
    variable = (os.environ if environment is None else environment).get(ENVIRONMENT_KEY)
    required = _required(wishes, cross_layer)
    asked = (
        _Ask(Decider.OVERRIDE, "the override", override),
        _Ask(Decider.ENVIRONMENT, f"{ENVIRONMENT_KEY}={variable}", variable),
        required,
    )
    ask = next((ask for ask in asked if ask is not None and ask.name), None)
    choice = None
    if ask is not None:
        layout = ask.layout(cross_layer)
        if layout not in candidates:
            raise ConfigError(_refusal(ask, layout, backends, candidates))
        _check_contradiction(ask, required, cross_layer)
        choice = LayoutChoice(layout, ask.decider, candidates)
    preferences = [wish for wish in wishes if wish.layout and not wish.required]
    for wish in preferences:
        ask = _Ask.of(wish)
        loss = _loss(ask, choice, backends, candidates, cross_layer)
        if loss:
            logger.warning("%s Going on without it.", loss)
        elif choice is None:
            choice = LayoutChoice(ask.layout(cross_layer), ask.decider, candidates)
    if choice is None:
        preferred = canonical_layout("NHD", layers=cross_layer)
        layout = preferred if preferred in candidates else candidates[0]
        choice = LayoutChoice(layout, Decider.DEFAULT, candidates)
    return choice


@dataclass(frozen=True, slots=True)
class _Ask:
    """Somebody asks for a layout."""

    decider: Decider
    who: str
    name: str | None

    @classmethod
    def of(cls, wish: LayoutWish) -> "_Ask":
        return cls(Decider.CONNECTOR, f"connector {wish.connector}", wish.layout)

    def layout(self, cross_layer: bool) -> str:
        """ConfigError for an unknown name."""
        asked_by = self.who.partition("=")[0]
        return canonical_layout(self.name or "", layers=cross_layer, asked_by=asked_by)


def _required(wishes: Sequence[LayoutWish], cross_layer: bool) -> _Ask | None:
    """What connectors require; they can't all work if they disagree."""
    firm = [wish for wish in wishes if wish.layout and wish.required]
    layouts = {_Ask.of(wish).layout(cross_layer) for wish in firm}
    if len(layouts) > 1:
        each = ", ".join(f"{wish.connector} {wish.layout}" for wish in firm)
        raise ConfigError(
            f"connectors require different KV cache layouts: {each}. Use connectors "
            "that agree"
        )
    return _Ask.of(firm[0]) if firm else None


def _check_contradiction(winner: _Ask, required: _Ask | None, layers: bool) -> None:
    """Whoever decides, a connector that requires another layout can't work."""
    if required is None:
        return
    chosen, needed = winner.layout(layers), required.layout(layers)
    if chosen != needed:
        change = {
            Decider.OVERRIDE: f"set the override to {required.name}, or drop it",
            Decider.ENVIRONMENT: f"set {ENVIRONMENT_KEY}={required.name}, or unset it",
        }
        raise ConfigError(
            f"{winner.who} asks for KV cache layout {_meaning(winner, chosen)}, but "
            f"{required.who} requires {_meaning(required, needed)}: "
            f"{change[winner.decider]}, or use another connector"
        )


def _loss(
    ask: _Ask,
    choice: LayoutChoice | None,
    backends: Mapping[str, BackendLayout],
    candidates: Sequence[str],
    cross_layer: bool,
) -> str:
    """Why a preference is not what happens; empty if it is, or may be."""
    try:
        layout = ask.layout(cross_layer)
    except ConfigError as error:
        return f"{error}"
    if layout not in candidates:
        return _refusal(ask, layout, backends, candidates)
    if choice is not None and choice.layout != layout:
        return (
            f"{ask.who} asks for KV cache layout {_meaning(ask, layout)}, but "
            f"{choice.layout} was chosen by {choice.decided_by}."
        )
    return ""


def _suitable(cross_layer: bool, one_kind: bool, mixed_pages: bool) -> list[str]:
    either = one_kind and not cross_layer
    return [
        layout
        for layout in LAYOUTS
        if (either or is_cross_layer(layout) == cross_layer)
        and (is_block_compact(layout) or not mixed_pages)
    ]


def _candidates(
    backends: Mapping[str, BackendLayout], suitable: Sequence[str]
) -> tuple[str, ...]:
    candidates = tuple(
        layout
        for layout in suitable
        if all(layout in backend.orders for backend in backends.values())
    )
    if not candidates:
        raise ConfigError(
            f"no KV cache layout of {', '.join(suitable)} suits all attention "
            f"backends: {_supported(backends)}"
        )
    return candidates


def _refusal(
    ask: _Ask,
    layout: str,
    backends: Mapping[str, BackendLayout],
    candidates: Sequence[str],
) -> str:
    return (
        f"{ask.who} asks for KV cache layout {_meaning(ask, layout)}, which these "
        f"layers can't have. Attention backends support: {_supported(backends)}. "
        f"These would work: {', '.join(candidates)}."
    )


def _meaning(ask: _Ask, layout: str) -> str:
    """The name that was given, and what it stands for."""
    name = ask.name or ""
    return name if name.upper() == layout else f"{name} ({layout})"


def _supported(backends: Mapping[str, BackendLayout]) -> str:
    """Each backend once, with the first layer that has it."""
    layers: dict[str, str] = {}
    for layer, backend in backends.items():
        layers.setdefault(
            backend.name, f"{backend.name} ({layer}) {', '.join(backend.orders)}"
        )
    return "; ".join(layers.values())
