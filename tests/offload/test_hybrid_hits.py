"""What host memory offers is the most that every group can go on from."""

from collections.abc import Iterator

import pytest

from tests.offload.hybrid_lab import HybridLab
from tests.offload.hybrid_mixes import MIXES
from tests.offload.hybrid_oracle import Prefill

LENGTHS = [1, 4, 5, 8, 13, 16, 23, 24, 25, 32, 33, 48, 70]
TAIL = [7, 7, 7]


def documents(lab: HybridLab) -> Iterator[tuple[int, list[int]]]:
    """One of each length, computed and stored; the engine has forgotten them."""
    for number, length in enumerate(LENGTHS):
        document = [*range(1000 * number, 1000 * number + length)]
        lab.serve(document)
        yield length, document
    lab.drain()


@pytest.mark.parametrize("name", MIXES)
def test_a_document_is_offered_as_far_as_every_group_can_go_on(name: str) -> None:
    lab = HybridLab(MIXES[name])
    for length, document in documents(lab):
        stored = Prefill(lab.mix, length, 16)
        for question in (document, [*document, *TAIL], [*document[:-1], *TAIL]):
            shared = length - (question[:length] != document)
            wanted = stored.offers(question, shared)
            assert lab.offered(question) == (wanted, True), (length, question)


@pytest.mark.parametrize("name", MIXES)
def test_what_was_offered_is_loaded_and_right(name: str) -> None:
    lab = HybridLab(MIXES[name])
    hits = 0
    for length, document in documents(lab):
        lab.forget_local()
        wanted = Prefill(lab.mix, length, 16).offers([*document, *TAIL], length)
        id_ = lab.serve([*document, *TAIL], 3)
        assert sum(lab.witness.credited.get(id_, [])) == wanted, length
        hits += wanted > 0
    assert hits > len(LENGTHS) / 2
    assert lab.account.totals["loaded_tokens"] == lab.num_credited


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("local", [8, 32])
def test_beyond_a_local_hit_only_the_rest_is_loaded(name: str, local: int) -> None:
    """The engine's own hit ends in the middle of what host memory has. That exactly
    the rest is loaded, the witness verifies."""
    lab = HybridLab(MIXES[name])
    document = [*range(64)]
    lab.serve(document)
    lab.forget_local()
    lab.serve([*document[:local], *TAIL])
    hit = lab.kv.find_computed_blocks(lab.request_of([*document, *TAIL]))[1]
    id_ = lab.serve([*document, *TAIL], 2)
    loaded = sum(lab.witness.credited.get(id_, []))
    assert loaded + hit == Prefill(lab.mix, 64, 16).offers([*document, *TAIL], 64)
    lab.drain()


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("blocks", [3, 16])
def test_chunks_of_several_blocks(name: str, blocks: int) -> None:
    lab = HybridLab(MIXES[name], usable=120, offload={"blocks_per_chunk": blocks})
    for number, length in enumerate((23, 64, 100)):
        document = [*range(1000 * number, 1000 * number + length)]
        lab.serve(document)
        lab.forget_local()
        stored = Prefill(lab.mix, length, 16, blocks_per_chunk=blocks)
        wanted = stored.offers([*document, *TAIL], length)
        id_ = lab.serve([*document, *TAIL], 2)
        assert sum(lab.witness.credited.get(id_, [])) == wanted, length
    lab.drain()


DOCUMENT = [*range(100, 148)]


@pytest.mark.parametrize("name", MIXES)
def test_what_is_being_stored_is_waited_for(name: str) -> None:
    lab = HybridLab(MIXES[name])
    lab.hold()
    lab.add(DOCUMENT, 1)
    lab.steps(4)
    stores = lab.pending(store=True)
    assert stores
    lab.forget_local()
    lab.add([*DOCUMENT, *TAIL], 2)
    lab.steps(3)
    assert lab.outputs["r1"] == []
    assert not lab.pending(store=False)
    lab.complete(*stores)
    lab.steps(2)
    assert lab.pending(store=False)
    lab.drain()
    wanted = Prefill(lab.mix, 48, 16).offers([*DOCUMENT, *TAIL], 48)
    assert lab.witness.credited["r1"] == [wanted]


@pytest.mark.parametrize("name", MIXES)
def test_two_requests_for_one_document_make_one_load(name: str) -> None:
    """Where the engine keeps what was loaded for the first one."""
    mix = MIXES[name]
    lab = HybridLab(mix, usable=2 * mix.usable)
    lab.serve(DOCUMENT)
    lab.forget_local()
    lab.hold()
    lab.add([*DOCUMENT, *TAIL], 2)
    lab.add([*DOCUMENT, 8, 8], 2)
    lab.steps(2)
    assert len(lab.pending(store=False)) == (1 if mix.caching else 2)
    lab.let_go()
    lab.run()
    assert len(lab.jobs(store=False)) == (1 if mix.caching else 2)
    assert sorted(lab.reasons) == ["r0", "r1", "r2"]
    lab.drain()


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("blocks", [1, 2])
def test_in_full_host_memory_the_last_document_is_whole(name: str, blocks: int) -> None:
    """Each group has room for the longest request, whatever others left there."""
    mix = MIXES[name]
    offload = {"blocks_per_chunk": blocks}
    lab = HybridLab(mix, usable=2 * mix.usable, host=1, offload=offload)
    for number in range(5):
        lab.serve(range(1000 * number, 1000 * number + 60))
    document = [*range(9000, 9096)]
    lab.serve(document)
    assert lab.account.totals["evicted_blocks"]
    stored = Prefill(mix, 96, 16, blocks)
    offered = lab.offered([*document, *TAIL]).tokens
    assert offered == stored.offers([*document, *TAIL], 96)
    lab.forget_local()
    lab.serve([*document, *TAIL], 2)
    lab.drain()


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("blocks", [1, 2])
def test_of_what_is_longer_than_host_memory_a_part_is_hit(
    name: str, blocks: int
) -> None:
    """Not the blocks of one group without those of another, which nobody could go on
    from; and storing the rest does not cost what a request has just been given."""
    mix = MIXES[name]
    offload = {"blocks_per_chunk": blocks}
    lab = HybridLab(mix, usable=3 * mix.usable, host=0.4, offload=offload)
    document = [*range(9000, 9120)]
    lab.serve(range(50))
    for question in range(3):
        lab.forget_local()
        id_ = lab.serve([*document, question], 2)
        assert lab.offered([*document, *TAIL]).tokens >= 40, question
        assert lab.witness.credited.get(id_) or not question
    lab.drain()
