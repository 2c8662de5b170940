"""Where the bytes of a block are: descriptors, stride arithmetic, plans; pure data.

A block can be moved as bytes (`block_runs`), whatever is inside; or, where the page's
interior is known (`KVLayout`), row by row into a page of another shape
(`plan_conversion`). Nothing here touches memory: the engines are in
`kvplugin.kernels`.
"""

from kvplugin.layout.conversion import Axis, Box, Conversion, plan_conversion
from kvplugin.layout.heads import HeadSlice, RankSlice, head_slices
from kvplugin.layout.interior import MAX_PARTS, KVLayout, Part
from kvplugin.layout.runs import MAX_RUNS, PageLayout, Run, TensorLayout, block_runs
from kvplugin.layout.staging import Staging, Stretch, plan_staging
from kvplugin.layout.states import (
    Section,
    StatePart,
    StateSlice,
    state_parts,
    state_slices,
)

__all__ = [
    "MAX_PARTS",
    "MAX_RUNS",
    "Axis",
    "Box",
    "Conversion",
    "HeadSlice",
    "KVLayout",
    "PageLayout",
    "Part",
    "RankSlice",
    "Run",
    "Section",
    "Staging",
    "StatePart",
    "StateSlice",
    "Stretch",
    "TensorLayout",
    "block_runs",
    "head_slices",
    "plan_conversion",
    "plan_staging",
    "state_parts",
    "state_slices",
]
