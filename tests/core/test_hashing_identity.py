"""Requests share blocks exactly if all that their bytes depend on is equal."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplugin.hashing import HashFormat, PrefixWitness
from kvplugin.hashing.own import kv_sha256, xxh3_128
from kvplugin.request import Adapter, MediaItem, MediaRange, Request

BLOCK = 4
PROMPT = 12
SHA = kv_sha256()
OWN = pytest.mark.parametrize("chain", [SHA, xxh3_128()], ids=lambda c: c.name)


@dataclass(frozen=True)
class Identity:
    """All but the tokens; equal ones may share, others must not."""

    adapter: Adapter | None = None
    salt: str | None = None
    epoch: int = 0
    media: tuple[MediaItem, ...] = ()
    embeds: tuple[float, ...] | None = None

    def request(self, chain: HashFormat = SHA, tokens: Any = None) -> Request:
        embeds = None
        if self.embeds is not None:
            embeds = np.array(self.embeds, np.float32).reshape(PROMPT, 1)
        return Request(
            "r",
            [0] * PROMPT if tokens is None else tokens,
            hash_format=chain,
            hash_block_size=BLOCK,
            lora_request=self.adapter,
            cache_salt=self.salt,
            weight_epoch=self.epoch,
            mm_features=self.media,
            prompt_embeds=embeds,
        )


# Few letters, so that names of different fields often concatenate alike.
NAMES = st.text("ab", max_size=3)
ADAPTERS = st.builds(Adapter, NAMES, NAMES, st.integers(0, 2))


@st.composite
def media(draw: st.DrawFn) -> tuple[MediaItem, ...]:
    edges = sorted(draw(st.sets(st.integers(0, PROMPT), max_size=6)))
    return tuple(
        MediaItem(draw(NAMES), MediaRange(begin, end - begin))
        for begin, end in zip(edges[::2], edges[1::2], strict=False)
    )


IDENTITIES = st.builds(
    Identity,
    st.none() | ADAPTERS,
    st.none() | NAMES,
    st.integers(0, 2),
    media(),
    st.none() | st.tuples(*[st.sampled_from([0.0, 1.0])] * PROMPT),
)


@OWN
@given(st.lists(IDENTITIES, min_size=2, max_size=8, unique=True))
def test_identities_that_differ_end_in_different_hashes(
    chain: HashFormat, identities: list[Identity]
) -> None:
    # The last block covers all before it, so differences anywhere reach it.
    ends = [identity.request(chain).block_hashes[-1] for identity in identities]
    assert len(set(ends)) == len(identities)


@OWN
@given(IDENTITIES)
def test_equal_identities_share_all(chain: HashFormat, identity: Identity) -> None:
    one, other = (replace(identity).request(chain).block_hashes for _ in range(2))
    assert one == other


@given(IDENTITIES, IDENTITIES)
def test_blocks_are_shared_up_to_the_first_difference(
    one: Identity, other: Identity
) -> None:
    same = one.request().block_hashes[0] == other.request().block_hashes[0]
    assert same == (_start(one) == _start(other))


def _start(identity: Identity) -> tuple[object, ...]:
    """What the first block depends on."""
    items = [item for item in identity.media if item.mm_position.offset < BLOCK]
    embeds = identity.embeds and identity.embeds[:BLOCK]
    return identity.adapter, identity.salt, identity.epoch, items, embeds


ALIKE = [
    Identity(),
    Identity(adapter=Adapter("X")),
    Identity(salt="X"),
    Identity(salt=""),
    Identity(adapter=Adapter("X", "X")),
    Identity(adapter=Adapter("XX")),
    Identity(adapter=Adapter("", "XX")),
    Identity(adapter=Adapter("X"), salt="X"),
    Identity(adapter=Adapter("X", epoch=1)),
    Identity(epoch=1),
    Identity(adapter=Adapter("org_1"), salt="2345"),
    Identity(adapter=Adapter("org_12345"), salt=""),
    Identity(adapter=Adapter("org_12345")),
    Identity(media=(MediaItem("X", MediaRange(0, 4)),)),
    Identity(media=(MediaItem("X", MediaRange(0, 3)),)),
    Identity(media=(MediaItem("X", MediaRange(1, 3)),)),
    Identity(media=(MediaItem("X", MediaRange(0, 2)), MediaItem("", MediaRange(2, 2)))),
    Identity(media=(MediaItem("", MediaRange(0, 2)), MediaItem("X", MediaRange(2, 2)))),
    Identity(embeds=(0.0,) * PROMPT),
    Identity(salt="\ud800\udc00"),
    Identity(salt="\U00010000"),
]


@OWN
def test_adapter_and_salt_of_one_name_and_other_lookalikes(chain: HashFormat) -> None:
    firsts = [identity.request(chain).block_hashes[0] for identity in ALIKE]
    for (i, one), (j, other) in combinations(enumerate(firsts), 2):
        assert one != other, (ALIKE[i], ALIKE[j])


def test_extras_can_not_be_forged_as_tokens() -> None:
    seen: list[bytes] = []

    def digest(data: bytes) -> bytes:
        seen.append(data)
        return b"\x01\x02\x03\x04"

    chain = type(xxh3_128())("spy", digest, needs_token_check=True)
    Identity(media=(MediaItem("X" * 50, MediaRange(0, 2)),)).request(chain)
    lengths = [len(data) for data in seen[2:]]
    assert lengths[0] > lengths[1] == lengths[2] == 4 + 4 * BLOCK


def test_item_counts_in_every_block_that_it_overlaps_and_no_other() -> None:
    plain = Identity().request().block_hashes
    marked = Identity(media=(MediaItem("m", MediaRange(5, 2)),)).request().block_hashes
    assert plain[0] == marked[0]
    assert not set(plain[1:]) & set(marked[1:])


def test_long_item_counts_again_in_each_of_its_blocks() -> None:
    # Same blocks 0, other items in block 1: a chain alone would not see the second.
    one = (MediaItem("m", MediaRange(2, 8)),)
    two = (MediaItem("m", MediaRange(2, 2)), MediaItem("n", MediaRange(4, 6)))
    ends = {Identity(media=items).request().block_hashes[1] for items in (one, two)}
    assert len(ends) == 2


@OWN
@given(IDENTITIES, st.lists(st.integers(0, 9), max_size=20), st.data())
def test_any_split_of_appends_gives_the_hashes_of_the_whole(
    chain: HashFormat, identity: Identity, output: list[int], data: st.DataObject
) -> None:
    whole = identity.request(chain)
    whole.append_output_token_ids(output)
    grown = identity.request(chain)
    while output:
        cut = data.draw(st.integers(1, len(output)))
        grown.append_output_token_ids(output[0] if cut == 1 else output[:cut])
        output = output[cut:]
    assert grown.block_hashes == whole.block_hashes
    assert len(grown.block_hashes) == grown.num_tokens // BLOCK


# -- prompt embeddings -------------------------------------------------------------


def test_embeddings_are_digested_once_a_block() -> None:
    class Rows:
        reads: int = 0

        def __len__(self) -> int:
            return PROMPT

        def __getitem__(self, rows: slice) -> Any:
            Rows.reads += 1
            return np.full(rows.stop - rows.start, rows.start)

    request = Request("r", prompt_embeds=Rows(), hash_format=SHA, hash_block_size=BLOCK)
    PrefixWitness(request, BLOCK)
    request.append_output_token_ids([1] * 8)
    assert Rows.reads == PROMPT // BLOCK
    assert len(request.block_hashes) == 5


def test_tensors_and_arrays_with_equal_bytes_hash_alike() -> None:
    torch = pytest.importorskip("torch")
    array = np.arange(PROMPT * 3, dtype=np.float32).reshape(PROMPT, 3)
    makers: list[Callable[[], Any]] = [
        lambda: array,
        lambda: torch.from_numpy(array),
        lambda: torch.from_numpy(array.T.copy()).T.requires_grad_(),
    ]
    found = [
        Request("r", prompt_embeds=make(), hash_format=SHA, hash_block_size=BLOCK)
        for make in makers
    ]
    assert all(r.block_hashes == found[0].block_hashes for r in found)
    other = torch.from_numpy(array).view(torch.bfloat16)
    viewed = Request("r", prompt_embeds=other, hash_format=SHA, hash_block_size=BLOCK)
    assert viewed.block_hashes[0] != found[0].block_hashes[0], "equal bytes, other type"


# -- witnesses ---------------------------------------------------------------------


@given(IDENTITIES, IDENTITIES, st.data())
def test_witness_covers_exactly_what_unbroken_hashes_cover(
    one: Identity, other: Identity, data: st.DataObject
) -> None:
    tokens = [
        data.draw(st.lists(st.integers(0, 1), min_size=PROMPT, max_size=PROMPT))
        for _ in range(2)
    ]
    if data.draw(st.booleans()):
        tokens[1] = tokens[0]
    a, b = one.request(tokens=tokens[0]), other.request(tokens=tokens[1])
    a.append_output_token_ids([1] * BLOCK)
    kept, mine = PrefixWitness(a, BLOCK), PrefixWitness(b, BLOCK)
    for blocks in range(1, PROMPT // BLOCK + 1):
        same = a.block_hashes[blocks - 1] == b.block_hashes[blocks - 1]
        assert kept.covers(mine, blocks * BLOCK) == same
        assert mine.covers(kept, blocks * BLOCK) == same
    assert not kept.covers(mine, PROMPT + BLOCK)
    assert not mine.covers(kept, PROMPT + BLOCK)


def test_witness_tells_prefixes_apart_whose_hashes_collide() -> None:
    broken = type(xxh3_128())("broken", lambda _: b"same", needs_token_check=True)
    a = Identity().request(broken, [1] * BLOCK + [2] * BLOCK)
    b = Identity().request(broken, [3] * BLOCK + [2] * BLOCK)
    assert a.block_hashes == b.block_hashes
    assert not PrefixWitness(a, BLOCK).covers(PrefixWitness(b, BLOCK), 2 * BLOCK)
