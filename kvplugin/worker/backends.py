"""How an attention backend describes what it makes of a layer's memory.

A cache is a strided view. Its *axes* (what each dimension counts) are the backend's;
the order in which they lie in memory is the backend's too, one for each *layout* it
supports. Layouts have vLLM 0.32's names: the order, outermost first, of L(ayer),
B(lock), H(ead), N (tokens of a block) and C (what a token keeps for a head). ``NHD``
and ``HND`` are LBNHC and LBHNC, or with a layers dimension BLNHC and BHLNC. A layout
that begins with L gives each layer memory of its own.

A third-party backend is one `BackendLayout`, given wherever one from the table
(`backend_table.py`) is.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from kvplugin.errors import ConfigError, unknown_name
from kvplugin.layout.interior import AXES
from kvplugin.spec import AttentionSpec
from kvplugin.worker.kernel_blocks import BlockSizes, MultipleOf

_LETTERS: Final = {"L": "layer", "B": "block", "H": "head", "N": "token", "C": "dim"}
LAYOUTS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        name: tuple(_LETTERS[letter] for letter in name)
        for name in ("LBNHC", "LBHNC", "BLNHC", "BLHNC", "BHLNC", "LHBNC")
    }
)
"""Layout -> its axes, outermost first; preferred ones first (0.32's order begins with
LBHNC or LBNHC by backend; here NHD is the default)."""
ALIASES: Final = MappingProxyType(
    {"NHD": ("LBNHC", "BLNHC"), "HND": ("LBHNC", "BHLNC")}
)
"""Alias -> the layout without a layers dimension, and with one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendLayout:
    """How one backend lays out a layer's cache.

    Raises:
        ConfigError: axes or orders are not what the fields say.
    """

    name: str
    axes: tuple[str, ...]
    """Of the view that attention gets, from `kvplugin.layout.interior.AXES`."""
    orders: Mapping[str, tuple[str, ...]]
    """Layout -> ``layer`` and the axes as they lie in memory, outermost first."""
    row_elements: Callable[[AttentionSpec], int]
    """Elements along `dim`."""
    row_holds_key_and_value: bool = False
    """Whether a row is a key (`head_size` elements) and then a value."""
    block_sizes: BlockSizes = (MultipleOf(1),)
    """Tokens of a block that the kernels can read."""
    opaque: str = ""
    """Why rows cannot be found inside a page; empty where they can: its pages may then
    be converted, not only moved."""

    def __post_init__(self) -> None:
        """Refuse a layout that cannot be."""
        known = {"block", "token", "dim"} <= set(self.axes) <= set(AXES)
        if not known or len(set(self.axes)) != len(self.axes):
            raise ConfigError(
                f"backend {self.name}: axes {self.axes} must be from {AXES}, each at "
                "most once, with block, token and dim among them"
            )
        if not self.orders:
            raise ConfigError(
                f"backend {self.name} has no orders, so it supports no layout: give "
                f"the order in memory for at least one of {', '.join(LAYOUTS)}"
            )
        for layout, order in self.orders.items():
            if order[-1:] != ("dim",) and "dim" in order:
                raise ConfigError(
                    f"backend {self.name}, layout {layout}: dim must come last in the "
                    f"order in memory, not {order}: what a token keeps for a head is "
                    "one run of bytes"
                )
            outside_kv = tuple(axis for axis in order if axis != "kv")
            named = tuple(
                axis
                for axis in LAYOUTS.get(layout, ())
                if axis in ("layer", *self.axes)
            )
            if sorted(order) != sorted(("layer", *self.axes)) or outside_kv != named:
                raise ConfigError(
                    f"backend {self.name}: the order {order} is not layout {layout} of "
                    f"axes {self.axes}; layouts are {', '.join(LAYOUTS)}"
                )
        object.__setattr__(self, "orders", dict(self.orders))

    def __hash__(self) -> int:
        """Equal backends have one name."""
        return hash(self.name)

    def order(self, layout: str, *, block_major: bool = False) -> tuple[str, ...]:
        """``layer`` and the axes as they lie in memory, outermost first.

        Args:
            layout: one of `orders`.
            block_major: keys and values of a block lie together, whatever the order
                says: needed where other kinds of layers lie in the same memory.

        Raises:
            ConfigError: the backend does not support the layout.
        """
        order = self.orders.get(layout)
        if order is None:
            raise ConfigError(
                f"attention backend {self.name} does not support KV cache layout "
                f"{layout}; it supports {', '.join(self.orders)}"
            )
        if block_major and keys_first(order):
            rest = [axis for axis in order if axis != "kv"]
            rest.insert(rest.index("block") + 1, "kv")
            return tuple(rest)
        return order

    def stride_order(self, layout: str, *, layers: bool = False) -> tuple[int, ...]:
        """The order as a permutation of the axes (after ``layer``, if asked for)."""
        axes = ("layer", *self.axes) if layers else self.axes
        return tuple(axes.index(a) for a in self.order(layout) if a in axes)

    def shape(
        self, spec: AttentionSpec, num_blocks: int, block_size: int
    ) -> tuple[int, ...]:
        """Of the view: blocks of `block_size` tokens, as the kernels count them."""
        sizes = {
            "kv": 2,
            "block": num_blocks,
            "token": block_size,
            "head": spec.num_kv_heads,
            "dim": self.row_elements(spec),
        }
        return tuple(sizes[axis] for axis in self.axes)


def keys_first(order: tuple[str, ...]) -> bool:
    """Whether all keys lie before all values: a block is in two places."""
    return "kv" in order and order.index("kv") < order.index("block")


def canonical_layout(
    name: str, *, layers: bool = False, asked_by: str = "layout"
) -> str:
    """The layout that a name or an alias means.

    Args:
        name: a name from `LAYOUTS` or `ALIASES`; case does not matter.
        layers: whether an alias means the layout with a layers dimension.
        asked_by: where the name stands, for the error.

    Raises:
        ConfigError: there is no such layout.
    """
    upper = name.upper()
    if upper in ALIASES:
        return ALIASES[upper][layers]
    if upper not in LAYOUTS:
        known = (*LAYOUTS, *ALIASES)
        raise unknown_name("KV cache layout", name, known, asked_by)
    return upper


def is_cross_layer(layout: str) -> bool:
    """Whether the layers of a block lie together: one memory for all layers."""
    return LAYOUTS[layout][0] != "layer"


def is_block_compact(layout: str) -> bool:
    """Whether a layer's block is one run of bytes (but for keys before values)."""
    return set(LAYOUTS[layout][:2]) == {"layer", "block"}
