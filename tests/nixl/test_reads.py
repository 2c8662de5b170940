"""A plan of reads puts every token where it belongs, and touches nothing else."""

from dataclasses import replace

import numpy as np
from hypothesis import event, given, settings
from hypothesis import strategies as st

from kvplugin.connectors.negotiate import negotiate, pair_rank
from kvplugin.connectors.nixl.messages import GroupRead
from kvplugin.connectors.nixl.reads import ReadPlanner
from kvplugin.contract import GroupKind
from kvplugin.errors import ConfigError
from tests.core.kv_caches import (
    BACKENDS,
    FUSED_BACKENDS,
    LATENT_BACKENDS,
    PACKED_BACKENDS,
)
from tests.nixl.memories import (
    Engine,
    Layer,
    Side,
)
from tests.nixl.read_oracle import check_read

FAMILIES = {
    "equal": [*BACKENDS, *FUSED_BACKENDS],
    "fused": list(FUSED_BACKENDS),
    "latent": list(LATENT_BACKENDS),
    "packed": list(PACKED_BACKENDS),
}
BLOCKS = 9


@st.composite
def engines(draw: st.DrawFn) -> tuple[Engine, Engine, str]:
    """Two engines with the same layers, each in its own way."""
    family = draw(st.sampled_from(sorted(FAMILIES)))
    latent = family == "latent"
    heads = 0 if latent else draw(st.sampled_from([1, 2, 4, 8]))
    kinds = [GroupKind.MLA if latent else GroupKind.FULL]
    if draw(st.booleans()):
        kinds.append(GroupKind.SLIDING_WINDOW)
    layers = []
    for group in range(len(kinds)):
        for i in range(draw(st.integers(1, 2))):
            key = draw(st.sampled_from([1, 3, 8]))
            value = draw(st.sampled_from([2, 8])) if family == "fused" else key
            layers.append(Layer(f"{group}.{i}", group, heads, key, value))
    tp = draw(st.tuples(*[st.sampled_from([1, 2, 4])] * 2))
    if draw(st.booleans()):
        layers.append(Layer("state", len(kinds), 0, 0, 0, state=True))
        kinds.append(GroupKind.MAMBA)
    same = draw(st.booleans())
    sides = []
    for i in range(2):
        backends = {
            layer.name: draw(st.sampled_from(FAMILIES[family]))
            for layer in layers
            if not layer.state
        }
        sizes, splits = [], []
        for kind in kinds:
            splits.append(1 if kind is GroupKind.MAMBA else draw(st.integers(1, 2)))
            size = draw(st.sampled_from([1, 2, 3, 4, 8]))
            sizes.append(8 if kind is GroupKind.MAMBA else size * splits[-1])
        gap = draw(st.sampled_from([0, 4]))
        made = Side(backends, sizes, splits, BLOCKS, tp[i], seed=i + 1, state_gap=gap)
        sides.append(made)
    if same:
        sides[1] = replace(sides[0], tp=tp[1], seed=2, blocks=draw(st.integers(9, 11)))
    pp = draw(st.integers(1, 2))
    sides[0] = replace(sides[0], pp=min(pp, len(layers)))
    there, here = (Engine(layers, side, kinds) for side in sides)
    there.fill()
    return there, here, family


def rows(
    draw: st.DrawFn, there: Engine, here: Engine, first: int, end: int, group: int
) -> GroupRead:
    """Blocks in any order; null where we need nothing."""
    if there.kinds[group] is GroupKind.MAMBA:
        block = draw(st.tuples(*[st.integers(1, BLOCKS - 1)] * 2))
        return GroupRead(group, first, end, [block[0]], [block[1]])
    found = []
    for side in (there.side, here.side):
        size = side.block_sizes[group]
        count = -(-end // size) - first // size if end > first else 0
        ids = draw(st.permutations(range(1, side.blocks)))
        if draw(st.booleans()):
            ids = sorted(ids[:count])
        found.append(list(ids[:count]))
    return GroupRead(group, first, end, found[0], found[1])


def longest(there: Engine, here: Engine) -> int:
    """Tokens that rows of all blocks hold, wherever they begin."""
    sizes = [
        size
        for side in (there.side, here.side)
        for size, kind in zip(side.block_sizes, there.kinds, strict=True)
        if kind is not GroupKind.MAMBA
    ]
    return (BLOCKS - 2) * min(sizes)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_read(data: st.DataObject) -> None:
    there, here, family = data.draw(engines())
    source, reader = there.descriptor(), here.descriptor()
    summary = negotiate(reader, source).summary
    event(f"{family}, tp {there.side.tp} to {here.side.tp}")
    event("as they are" if "converted" not in summary else "converted")
    room = longest(there, here)
    reads = []
    for group in range(len(there.kinds)):
        first = data.draw(st.integers(0, 30))
        end = first + data.draw(st.integers(0, room))
        reads.append(rows(data.draw, there, here, first, end, group))
    staging = np.zeros(data.draw(st.sampled_from([64, 4096, 1 << 16])), np.uint8)
    for rank, own in enumerate(reader.ranks):
        pairings = pair_rank(reader, own, source)
        try:
            planner = ReadPlanner(pairings, staging.ctypes.data, len(staging))
        except ConfigError:
            event("staging is too small")
            staging = np.zeros(1 << 18, np.uint8)
            planner = ReadPlanner(pairings, staging.ctypes.data, len(staging))
        batches = check_read(there, here, rank, planner, reads, staging)
        event(f"{min(batches, 3)} batches")
