"""Which layout the KV cache of an engine has, and who decided it.

One layout holds for all layers. It is asked for, in this order, by an override in the
code, by the environment (``VLLM_KV_CACHE_LAYOUT``), by connectors; otherwise it is NHD
(vLLM 0.19.1 `get_kv_cache_layout`). Unlike there, it has to be one that every backend
reads: a backend that ignores what a connector asked for sends heads as tokens.
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
    """False: another layout serves too, only less well."""


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
            suit them, or connectors that disagree. Says who asked for what, and what
            would work.
    """
    suitable = _suitable(cross_layer, one_kind, mixed_pages)
    candidates = _candidates(backends, suitable)
    variable = (os.environ if environment is None else environment).get(ENVIRONMENT_KEY)
    # Connectors that disagree can't all work, whoever decides.
    wish = _agreed(wishes, cross_layer)
    asked = [
        (Decider.OVERRIDE, "the override", override, True),
        (Decider.ENVIRONMENT, f"{ENVIRONMENT_KEY}={variable}", variable, True),
    ]
    if wish is not None:
        who = f"connector {wish.connector}"
        asked.append((Decider.CONNECTOR, who, wish.layout, wish.required))
    for decider, who, name, required in asked:
        if not name:
            continue
        layout = canonical_layout(name, layers=cross_layer)
        if layout in candidates:
            return LayoutChoice(layout, decider, candidates)
        refusal = _refusal(who, name, layout, backends, candidates)
        if required:
            raise refusal
        logger.warning("%s Going on without it.", refusal)
    preferred = canonical_layout("NHD", layers=cross_layer)
    layout = preferred if preferred in candidates else candidates[0]
    return LayoutChoice(layout, Decider.DEFAULT, candidates)


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


def _agreed(wishes: Sequence[LayoutWish], cross_layer: bool) -> LayoutWish | None:
    """The one layout that connectors ask for; the first that requires it speaks."""
    firm = [wish for wish in wishes if wish.layout]
    layouts = {canonical_layout(w.layout or "", layers=cross_layer) for w in firm}
    if len(layouts) > 1:
        each = ", ".join(f"{wish.connector} {wish.layout}" for wish in firm)
        raise ConfigError(
            f"connectors ask for different KV cache layouts: {each}. Use connectors "
            "that agree"
        )
    return next(iter(sorted(firm, key=lambda wish: not wish.required)), None)


def _refusal(
    who: str,
    name: str,
    layout: str,
    backends: Mapping[str, BackendLayout],
    candidates: Sequence[str],
) -> ConfigError:
    meant = "" if name.upper() == layout else f" ({layout})"
    return ConfigError(
        f"{who} asks for KV cache layout {name}{meant}, which these layers can't have. "
        f"Attention backends support: {_supported(backends)}. These would work: "
        f"{', '.join(candidates)}."
    )


def _supported(backends: Mapping[str, BackendLayout]) -> str:
    """Each backend once, with the first layer that has it."""
    layers: dict[str, str] = {}
    for layer, backend in backends.items():
        layers.setdefault(
            backend.name, f"{backend.name} ({layer}) {', '.join(backend.orders)}"
        )
    return "; ".join(layers.values())
