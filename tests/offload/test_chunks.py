"""Chunk arithmetic: which blocks, under which key, where in host memory."""

import pytest

from kvplugin.connectors.offload.chunks import Chunking, chunkings
from kvplugin.contract import GroupKind
from kvplugin.errors import ConfigError
from kvplugin.hashing import make_key
from tests.offload import half
from tests.offload.setup_model import Request, Setup, View, prompt


def chunking(blocks: int, *, hashes_per_block: int = 1) -> Chunking:
    setup = Setup(hashes_per_block=hashes_per_block)
    return Chunking(setup.info().groups[0], blocks, setup.hash_block_size)


def view(tokens: int, *, hashes_per_block: int = 1) -> View:
    setup = Setup(hashes_per_block=hashes_per_block)
    return View(Request("r", prompt(tokens), 1, setup))


@pytest.mark.parametrize("hashes_per_block", [1, 2, 4])
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_the_key_of_a_chunk_is_the_hash_of_all_its_tokens_and_those_before(
    blocks: int, hashes_per_block: int
) -> None:
    request = view(30, hashes_per_block=hashes_per_block)
    cut = chunking(blocks, hashes_per_block=hashes_per_block)
    for chunk in cut.of(request):
        hashes = (chunk.number + 1) * blocks * hashes_per_block
        assert chunk.key == make_key(request.block_hashes[hashes - 1], 0)


def test_hashes_that_do_not_end_where_blocks_end_are_refused() -> None:
    """Two prompts that differ inside a block would have one key."""
    for size in (2, 6):
        odd = half.engine(half.group(GroupKind.FULL, size=size))
        with pytest.raises(ConfigError, match=f"blocks of {size} tokens.* 4 at a time"):
            chunkings(odd, 1)
        spared = half.group(GroupKind.OTHER, 1, size=size, reusable=False)
        assert len(chunkings(half.engine(half.group(GroupKind.FULL), spared), 1)) == 1


@pytest.mark.parametrize("first", range(4))
def test_the_parent_of_a_chunk_is_the_chunk_before_wherever_one_starts(
    first: int,
) -> None:
    request, cut = view(30), chunking(2)
    chunks = list(cut.of(request))
    assert [chunk.number for chunk in chunks] == [0, 1, 2]
    assert [chunk.parent for chunk in chunks] == [None, chunks[0].key, chunks[1].key]
    assert list(cut.of(request, first)) == chunks[first:]
    assert list(cut.of(request, first, 2)) == chunks[first:2]


def test_only_chunks_whose_tokens_are_all_known_exist() -> None:
    cut = chunking(2)
    assert [len(list(cut.of(view(tokens)))) for tokens in (1, 7, 8, 15, 16)] == [
        *(0, 0, 1, 1, 2)
    ]


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_every_block_of_every_slot_has_a_place_of_its_own(blocks: int) -> None:
    cut = chunking(blocks)
    places = [
        cut.host_block(slot, block)
        for slot, chunk in zip((1, 2, 3, 4), cut.of(view(48)), strict=False)
        for block in cut.engine_blocks(chunk)
    ]
    assert places == list(range(4 * blocks))
