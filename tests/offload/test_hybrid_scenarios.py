"""Faults that users of other offloaders met, over models of several groups."""

import pytest

from kvplugin.contract import MISS
from kvplugin.request import Adapter
from tests.core.manager_setups import full, mamba, window
from tests.offload.hybrid_lab import HybridLab
from tests.offload.hybrid_mixes import MIXES, Mix
from tests.offload.hybrid_oracle import Prefill

STATES = ["full+states", "full+aligned states", "full+coarse aligned states"]
HYBRIDS = sorted(name for name in MIXES if "+" in name)
DOCUMENT = [*range(100, 148)]
TAIL = [7, 7, 7]


# -- a state is the one after the credited tokens -----------------------------------


def test_prompt_of_two_blocks_goes_on_from_the_state_after_the_first() -> None:
    """All but the last token can be hit, and of states those at blocks' ends: the one
    after the whole prompt is there, and is one token too new."""
    lab = HybridLab(Mix(lambda n: (full(16), mamba("all", 16))))
    prompt = [*range(32)]
    lab.serve(prompt)
    lab.forget_local()
    id_ = lab.serve(prompt, 2)
    assert lab.witness.credited[id_] == [16]
    lab.drain()


@pytest.mark.parametrize("name", STATES)
def test_the_state_of_every_length_is_the_one_after_the_credited_tokens(
    name: str,
) -> None:
    """The toy model reads the state after exactly the tokens that count as computed,
    so a run with any other one ends in an error."""
    lab = HybridLab(MIXES[name])
    for length in range(1, 101):
        prompt = [*range(1000 * length, 1000 * length + length)]
        lab.serve(prompt)
        lab.forget_local()
        id_ = lab.serve(prompt, 2)
        wanted = Prefill(lab.mix, length, 16).offers(prompt, length)
        assert sum(lab.witness.credited.get(id_, [])) == wanted
        lab.forget_local()
    lab.drain()


# -- weights or adapter changed ----------------------------------------------------


@pytest.mark.parametrize("name", HYBRIDS)
def test_nothing_of_old_weights_is_found(name: str) -> None:
    lab = HybridLab(MIXES[name])
    lab.serve(DOCUMENT)
    assert lab.offered([*DOCUMENT, *TAIL]).tokens
    assert lab.scheduler.reset_prefix_cache(weight_epoch=1)
    for epoch in (0, 1):
        assert lab.offered([*DOCUMENT, *TAIL], weight_epoch=epoch) == MISS
    id_ = lab.serve([*DOCUMENT, *TAIL], 2)
    assert id_ not in lab.witness.credited
    lab.drain()


@pytest.mark.parametrize("name", HYBRIDS)
def test_what_runs_while_the_weights_change_leaves_nothing_of_the_old_ones(
    name: str,
) -> None:
    """A store of theirs is under way, and so is a request that has more to store."""
    lab = HybridLab(MIXES[name])
    lab.hold()
    lab.add([*DOCUMENT, *TAIL], 4)
    lab.steps(2)
    assert lab.pending(store=True)
    lab.scheduler.reset_prefix_cache(weight_epoch=1)
    lab.complete(*lab.pending(store=True))
    assert lab.offered([*DOCUMENT, *TAIL], weight_epoch=0) == MISS
    lab.let_go()
    lab.run()
    assert lab.offered([*DOCUMENT, *TAIL], weight_epoch=0) == MISS
    lab.forget_local()
    lab.serve([*DOCUMENT, *TAIL], 2)  # whatever it finds is of the new weights
    lab.drain()


@pytest.mark.parametrize(
    "others",
    [
        {"lora_request": Adapter("a", "here", epoch=2)},
        {"lora_request": Adapter("b", "here", epoch=1)},
        {"cache_salt": "a"},
        {},
    ],
)
def test_nothing_of_another_adapter_or_tenant_is_found(others: dict) -> None:  # type: ignore[type-arg]
    lab = HybridLab(MIXES["full+two windows"])
    first = {"lora_request": Adapter("a", "here", epoch=1)}
    lab.serve(DOCUMENT, **first)
    lab.forget_local()
    assert lab.offered([*DOCUMENT, *TAIL], **first).tokens
    assert lab.offered([*DOCUMENT, *TAIL], **others) == MISS
    lab.serve([*DOCUMENT, *TAIL], 2, **others)
    lab.drain()


# -- a reset that says success -----------------------------------------------------


@pytest.mark.parametrize("name", HYBRIDS)
def test_after_a_reset_nothing_is_found(name: str) -> None:
    lab = HybridLab(MIXES[name])
    lab.serve(DOCUMENT)
    assert lab.offered([*DOCUMENT, *TAIL]).tokens
    assert lab.scheduler.reset_prefix_cache()
    assert lab.offered([*DOCUMENT, *TAIL]) == MISS
    id_ = lab.serve([*DOCUMENT, *TAIL], 2)
    assert id_ not in lab.witness.credited
    assert lab.offered([*DOCUMENT, *TAIL, *TAIL]).tokens, "it stores again"
    lab.drain()


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_reset_during_a_load_is_not_over_before_it(name: str) -> None:
    lab = HybridLab(MIXES[name])
    lab.serve(DOCUMENT)
    lab.forget_local()
    lab.hold()
    lab.add([*DOCUMENT, *TAIL], 2)
    lab.step()
    (load,) = lab.pending(store=False)
    assert not lab.scheduler.reset_prefix_cache(reset_running=True)
    assert lab.offered([*DOCUMENT, *TAIL]) == MISS
    lab.complete(load)
    lab.let_go()
    lab.run()
    assert lab.scheduler.reset_prefix_cache()
    assert lab.offered([*DOCUMENT, *TAIL]) == MISS
    lab.drain()


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_store_that_ends_after_a_reset_is_not_kept(name: str) -> None:
    lab = HybridLab(MIXES[name])
    lab.hold()
    lab.add(DOCUMENT, 1)
    lab.steps(4)
    assert lab.pending(store=True)
    lab.scheduler.reset_prefix_cache()
    lab.let_go()
    lab.run()
    assert lab.offered([*DOCUMENT, *TAIL]) == MISS
    lab.drain()


# -- a hit that starts inside a chunk ----------------------------------------------


@pytest.mark.parametrize(
    "others", [(), (window(6),), (mamba("all"),), (mamba("align"),)]
)
def test_of_a_chunk_that_the_engine_has_a_part_of_the_rest_is_loaded(
    others: tuple[window, ...],  # type: ignore[valid-type]
) -> None:
    """A chunk is 16 blocks; the engine has 3 of them."""
    mix = Mix(lambda n: (full(), *others), usable=80)
    lab = HybridLab(mix, offload={"blocks_per_chunk": 16}, budget=64)
    document = [*range(64)]
    lab.serve(document)
    lab.forget_local()
    lab.serve(document[:12], 1)  # too short to be loaded: no whole chunk
    hit = lab.kv.find_computed_blocks(lab.request_of([*document, *TAIL]))[1]
    assert hit == 12
    id_ = lab.serve([*document, *TAIL], 2)
    assert lab.witness.credited[id_] == [52]
    dense = next(p for p in lab.jobs(store=False)[-1].parts if p[0] == 0)
    assert len(dense[1]) == 13
    lab.drain()


# -- many chunks -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["full+window", "full+aligned states"])
def test_two_hundred_chunks_arrive_byte_by_byte(name: str) -> None:
    """The toy model reads each of their tokens, and says which one is wrong."""
    tokens = 200 * 2 * 4
    lab = HybridLab(
        MIXES[name],
        usable=1000,
        host=2,
        max_model_len=2048,
        budget=256,
        offload={"blocks_per_chunk": 2},
    )
    document = [*range(tokens)]
    lab.serve(document)
    lab.forget_local()
    id_ = lab.serve([*document, *TAIL], 2)
    assert lab.witness.credited[id_] == [tokens]
    (load,) = lab.jobs(store=False)
    dense = next(p for p in load.parts if p[0] == 0)
    assert len(dense[1]) == 400
    lab.drain()
