"""How vLLM's ranks share the rows of recurrent states.

A state is a convolution's last inputs and a matrix a head, or one of the two. The
channels of a convolution are those of several projections side by side, and each of
these is split over the ranks for itself.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from vllm.model_executor.layers.mamba import mamba_utils

from kvplugin.layout import Section, StatePart, state_parts

Shape: TypeAlias = Sequence[int]
Shared: TypeAlias = tuple[int, Sequence[Section]]
"""The axis of a tensor that is split over ranks, and what lies along it."""


def conv_layout() -> str:
    """``SD``: the channels place by place; ``DS``: the places channel by channel."""
    chosen = getattr(mamba_utils, "get_conv_state_layout", None)
    return "SD" if chosen is None else str(chosen())  # 0.19 has no choice


def parts_of_states(spec: Any, made: Any, tp_size: int) -> tuple[StatePart, ...]:
    """The rows of a page of states, and how many there are over all ranks.

    Args:
        spec: vLLM's `MambaSpec`, of this rank.
        made: vLLM's layer.
        tp_size: tensor-parallel ranks.

    Returns:
        Nothing where it is not known here what the channels are.
    """
    found: list[StatePart] = []
    for (axis, sections), shape, dtype in zip(
        _shared(spec, made, tp_size), spec.shapes, spec.dtypes, strict=False
    ):
        found += state_parts(
            shape,
            axis,
            sections,
            itemsize=dtype.itemsize,
            offset=found[-1].end if found else 0,
        )
    return tuple(found)


def _shared(spec: Any, made: Any, tp_size: int) -> list[Shared]:
    if getattr(spec, "tp_replicated", False):
        return [(0, [Section("copy", 1, 1, shape[0])]) for shape in spec.shapes]
    kind = str(getattr(spec.mamba_type, "name", spec.mamba_type)).lower()
    axes, make = _KINDS.get(kind, ((), _matrices))
    known = tuple(map(len, spec.shapes)) == axes
    return make(spec.shapes, made, tp_size) if known else []


def _channels(shape: Shape) -> tuple[int, int]:
    """The axis of a convolution's channels, and their number."""
    axis = 0 if conv_layout() == "DS" else 1
    return axis, shape[axis]


def _rows(name: str, rows: int, tp_size: int, width: int = 1) -> Section:
    """Each rank has its own."""
    return Section(name, rows, rows * tp_size, width)


def _short_conv(shapes: Sequence[Shape], _: Any, tp_size: int) -> list[Shared]:
    axis, channels = _channels(shapes[0])
    return [(axis, [_rows("x", channels, tp_size)])]


def _mamba1(shapes: Sequence[Shape], made: Any, tp_size: int) -> list[Shared]:
    """The matrix has a row a channel."""
    return [*_short_conv(shapes, made, tp_size), *_matrices(shapes[1:], made, tp_size)]


def _mamba2(shapes: Sequence[Shape], made: Any, tp_size: int) -> list[Shared]:
    """x, B and C; ranks beyond a single group hold copies of its B and C."""
    heads, head_dim, state = shapes[1]
    axis, channels = _channels(shapes[0])
    groups, rest = divmod(channels - heads * head_dim, 2 * state)
    model_groups = getattr(getattr(made, "norm", None), "n_groups", 0)
    total = 1 if model_groups == 1 else groups * tp_size
    if rest or groups < 1 or total != model_groups:
        return []
    return [
        (
            axis,
            [
                _rows("x", heads, tp_size, head_dim),
                Section("B", groups, total, state),
                Section("C", groups, total, state),
            ],
        ),
        (0, [_rows("matrix", heads, tp_size)]),
    ]


def _delta_net(shapes: Sequence[Shape], _: Any, tp_size: int) -> list[Shared]:
    """Queries, keys and values; the matrices are those of the values' heads."""
    heads, value_size, _key_size = shapes[1]
    axis, channels = _channels(shapes[0])
    keys, rest = divmod(channels - heads * value_size, 2)
    if rest or keys < 1:
        return []
    return [
        (
            axis,
            [
                _rows("query", keys, tp_size),
                _rows("key", keys, tp_size),
                _rows("value", heads, tp_size, value_size),
            ],
        ),
        (0, [_rows("matrix", heads, tp_size)]),
    ]


def _matrices(shapes: Sequence[Shape], _: Any, tp_size: int) -> list[Shared]:
    return [(0, [_rows("matrix", shapes[0][0], tp_size)])]


_Make: TypeAlias = Callable[[Sequence[Shape], Any, int], list[Shared]]
_KINDS: Final[Mapping[str, tuple[tuple[int, ...], _Make]]] = {
    "mamba1": ((2, 2), _mamba1),
    "mamba2": ((2, 3), _mamba2),
    "short_conv": ((2,), _short_conv),
    "gdn_attn": ((2, 3), _delta_net),
    "linear": ((3,), _matrices),
    # Names of 0.19.
    "gdn_attention": ((2, 3), _delta_net),
    "linear_attention": ((3,), _matrices),
}
"""By vLLM's name: axes of each tensor, and what is along them."""
