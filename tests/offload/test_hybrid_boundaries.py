"""The boundary that groups agree on is the one that brute force finds."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplugin.connectors.offload.boundary import Boundaries
from kvplugin.connectors.offload.chunks import chunkings
from kvplugin.spec import KVCacheSpec, SlidingWindowSpec
from tests.core.manager_setups import chunk, full, mamba, mla, window
from tests.offload.hybrid_mixes import MIXES, Mix
from tests.offload.hybrid_oracle import DENSE, best_boundary

SPECS = st.lists(
    st.one_of(
        st.builds(full, st.sampled_from([2, 4])),
        st.builds(mla, st.sampled_from([2, 4])),
        st.builds(window, st.integers(1, 14), st.sampled_from([2, 4, 6])),
        st.builds(chunk, st.integers(1, 14), st.sampled_from([2, 4])),
        st.builds(mamba, st.sampled_from(["all", "align"]), st.sampled_from([2, 4, 6])),
    ),
    min_size=1,
    max_size=4,
)


def agree(mix: Mix, seed: int, blocks: int, num_tokens: int, missing: float) -> bool:
    """Whether some boundary is found, the same both ways, of blocks that are there at
    random."""
    rnd = Random(seed)
    cuts = chunkings(mix.info(num_blocks=9), blocks)
    there = {
        (cut.index, number): rnd.random() > missing
        for cut in cuts
        for number in range(num_tokens // cut.tokens)
    }

    def has(group: int, block: int) -> bool:
        dense = mix.models[group].kind in DENSE
        return there.get((group, block // blocks if dense else block), False)

    boundaries = Boundaries(cuts)
    local = boundaries.floor(rnd.choice([0, rnd.randrange(num_tokens)]))
    found = boundaries.largest(
        local,
        num_tokens - 1,
        lambda cut, number: there.get((cut.index, number), False),
    )
    assert found == best_boundary(mix, num_tokens, has, local)
    return found > local


@settings(max_examples=300, deadline=None)
@given(
    specs=SPECS,
    rereads=st.booleans(),
    retained=st.integers(0, 3),
    seed=st.integers(0, 10**6),
    blocks=st.integers(1, 3),
    num_tokens=st.integers(1, 60),
    missing=st.sampled_from([0.0, 0.05, 0.2]),
)
def test_any_groups(
    specs: list[KVCacheSpec],
    rereads: bool,
    retained: int,
    seed: int,
    blocks: int,
    num_tokens: int,
    missing: float,
) -> None:
    reach = min(
        (s.sliding_window for s in specs if type(s) is SlidingWindowSpec), default=9
    )
    retained = min(retained, reach - 1)
    mix = Mix(lambda n: tuple(specs), rereads=rereads, retained=retained)
    agree(mix, seed, blocks, num_tokens, missing)


@pytest.mark.parametrize("name", MIXES)
def test_known_models_find_some(name: str) -> None:
    found = [agree(MIXES[name], seed, 1, 50, 0.05) for seed in range(50)]
    assert sum(found) > 10


@pytest.mark.parametrize("length", range(1, 26))
@pytest.mark.parametrize("has_drafter", [False, True])
def test_a_drafter_sees_the_block_behind_a_hit(length: int, has_drafter: bool) -> None:
    """It must be there, so of a document that is stored exactly its last block gives
    no hit."""
    mix = Mix(lambda n: (full(), window(6)), rereads=has_drafter)
    stored = length // 4

    def has(group: int, block: int) -> bool:
        return block < stored

    (cuts, found) = chunkings(mix.info(num_blocks=9), 1), 0
    found = Boundaries(cuts).largest(0, 99, lambda cut, number: number < stored)
    assert found == max(stored - has_drafter, 0) * 4
    assert found == best_boundary(mix, 100, has)
