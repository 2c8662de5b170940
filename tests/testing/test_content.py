"""Each error of the content model comes for its reason, and not otherwise."""

import pytest

from kvplugin.block_pool import BlockPool
from kvplugin.errors import ConfigError
from kvplugin.spec import KVCacheSpec, UniformTypeKVCacheSpecs
from kvplugin.testing import (
    ContentError,
    ContentModel,
    Identity,
    Row,
    Void,
    group_models,
    watch_pool,
)
from kvplugin.testing.rules import PLAIN, group_model
from kvplugin.testing.slots import WRONG
from tests.core.manager_setups import chunk, cross, full, mamba, mla, sink, window
from tests.testing.driver import config_of

TOKENS = list(range(100, 112))
HISTORIES = PLAIN.histories(TOKENS)
ALL = range(len(TOKENS))


def memory_of(*specs: KVCacheSpec, strict: bool = True) -> ContentModel:
    return ContentModel(group_models(config_of(specs, 10)), 10, strict=strict)


def written(*specs: KVCacheSpec) -> tuple[ContentModel, Row]:
    """A request of 12 tokens in blocks 1, 2, 3 of group 0."""
    memory = memory_of(*(specs or (full(),)))
    row = Row("r", [1, 2, 3], memory.grants())
    memory.write(0, row, 0, HISTORIES)
    return memory, row


# -- what may be read ------------------------------------------------------------------


def test_what_was_written_can_be_read() -> None:
    memory, row = written()
    assert memory.read(0, row, ALL, HISTORIES) == HISTORIES


def test_equal_prefixes_of_two_requests_are_the_same_bytes() -> None:
    memory, _ = written()
    assert memory.read(0, Row("other", [1, 2]), range(8), HISTORIES) == HISTORIES[:8]


def test_a_slot_that_was_never_written() -> None:
    memory, row = written()
    with pytest.raises(ContentError, match=r"'r', group 0, position 12.*no block 3"):
        memory.read(0, row, [12], [*HISTORIES, 0])
    with pytest.raises(ContentError, match=r"'r', group 0.*block 4.*never written"):
        memory.read(0, Row("r", [4]), [0], HISTORIES)


def test_bytes_of_other_tokens() -> None:
    memory, row = written()
    other = PLAIN.histories([99, *TOKENS[1:]])
    with pytest.raises(ContentError, match="position 8: block 3, slot 0 holds other"):
        memory.read(0, row, [8], other)


def test_bytes_of_another_identity() -> None:
    memory, row = written()
    salted = Identity("salt").histories(TOKENS)
    with pytest.raises(ContentError, match="other bytes"):
        memory.read(0, row, [0], salted)


def test_an_image_changes_what_follows_it_only() -> None:
    picture = Identity(at={5: "cat"}).histories(TOKENS)
    assert picture[:5] == HISTORIES[:5]
    assert not set(picture[5:]) & set(HISTORIES)


def test_the_right_tokens_in_another_group() -> None:
    memory, row = written(full(), full())
    with pytest.raises(
        ContentError, match=r"group 1, position 0.*but as Slot\(group=0"
    ):
        memory.read(1, row, [0], HISTORIES)


def test_blocks_in_the_wrong_order() -> None:
    memory, _ = written()
    with pytest.raises(ContentError, match="other bytes"):
        memory.read(0, Row("r", [2, 1, 3]), [0], HISTORIES)


def test_the_null_block_is_not_read_where_it_counts() -> None:
    memory, _ = written(window(4))
    row = Row("r", [0, 2, 3])
    first = memory.groups[0].first_read(11)
    assert memory.read(0, row, range(first, 12), HISTORIES) == HISTORIES[8:]
    with pytest.raises(ContentError, match=r"position 3: entry 0 of its row .* null"):
        memory.read(0, row, [3], HISTORIES)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("poison", "poison"),
        ("zero", "zeros"),
        ("handed_out", "poison"),
    ],
)
def test_blocks_that_lost_their_bytes(how: str, message: str) -> None:
    memory, row = written()
    getattr(memory, how)([2])
    row = Row("r", row.blocks)
    memory.read(0, row, range(4), HISTORIES)
    with pytest.raises(ContentError, match=f"position 4: block 2, .* holds {message}"):
        memory.read(0, row, ALL, HISTORIES)


def test_bytes_of_a_failed_load_are_read_as_wrong() -> None:
    memory, row = written()
    memory.invalidate([2])
    found = memory.read(0, row, ALL, HISTORIES)
    assert found == [*HISTORIES[:4], *[WRONG] * 4, *HISTORIES[8:]]


def test_a_draft_models_scratch_is_no_content() -> None:
    memory, row = written()
    memory.scribble(0, row, 10, 20)
    with pytest.raises(ContentError, match=r"position 10.*scratch"):
        memory.read(0, row, ALL, HISTORIES)


def test_a_lenient_model_returns_what_is_wrong() -> None:
    memory = memory_of(full(), strict=False)
    row = Row("r", [1, 0])
    memory.write(0, row, 0, HISTORIES[:4])
    assert memory.read(0, row, [3, 4], HISTORIES) == [HISTORIES[3], WRONG]


# -- what may be written ---------------------------------------------------------------


def test_a_write_to_the_null_block() -> None:
    memory = memory_of(full(), mamba("all"))
    with pytest.raises(ContentError, match=r"'r', group 0, position 4: .* null block"):
        memory.write(0, Row("r", [1, 0]), 3, HISTORIES[:2])
    with pytest.raises(ContentError, match="null block"):
        memory.write_state(1, Row("r", [0]), 0, 3, HISTORIES[3])
    with pytest.raises(ContentError, match="null block"):
        memory.zero([0])


def test_a_block_that_was_handed_to_somebody_else() -> None:
    memory, row = written()
    memory.handed_out([3])
    memory.write(0, row, 4, HISTORIES[4:5])
    for act in (
        lambda: memory.write(0, row, 8, HISTORIES[8:]),
        lambda: memory.read(0, row, [8], HISTORIES),
    ):
        with pytest.raises(ContentError, match="position 8: block 3 was handed to"):
            act()
    memory.write(0, Row("new", [3], memory.grants()), 0, HISTORIES[:4])


def test_a_block_that_is_free() -> None:
    pool = BlockPool(10)
    memory = memory_of(full())
    watch_pool(pool, memory)
    blocks = pool.get_new_blocks(2)
    row = Row("r", blocks, memory.grants())
    memory.write(0, row, 0, HISTORIES[:8])
    pool.free_blocks(blocks[1:])
    memory.read(0, row, range(4), HISTORIES)
    with pytest.raises(ContentError, match=f"writes block {blocks[1]}, which is free"):
        memory.write(0, row, 4, HISTORIES[4:8])
    with pytest.raises(ContentError, match="poison"):
        memory.read(0, row, [4], HISTORIES)


def test_a_watched_pool_keeps_what_can_be_hit() -> None:
    pool = BlockPool(4)
    memory = memory_of(full())
    watch_pool(pool, memory)
    one, two = pool.get_new_blocks(2)
    row = Row("r", [one, two])
    memory.write(0, row, 0, HISTORIES[:8])
    pool.insert([one, two], [b"one" + bytes(4), b"two" + bytes(4)])
    pool.free_blocks([two, one])
    assert memory.read(0, row, range(8), HISTORIES)
    pool.evict_blocks([two])
    with pytest.raises(ContentError, match="poison"):
        memory.read(0, row, [4], HISTORIES)
    pool.drop_all_keys()
    with pytest.raises(ContentError, match="poison"):
        memory.read(0, row, [0], HISTORIES)


# -- states ----------------------------------------------------------------------------


def test_a_state_is_that_after_exactly_so_many_tokens() -> None:
    memory = memory_of(mamba("all"))
    row = Row("r", [1, 2])
    memory.write_state(0, row, 0, 3, HISTORIES[3])
    assert memory.read_state(0, row, 0, 3, HISTORIES[3]) == HISTORIES[3]
    with pytest.raises(ContentError, match="position 2: block 1"):
        memory.read_state(0, row, 0, 2, HISTORIES[2])  # one token too new
    with pytest.raises(ContentError, match="never written"):
        memory.read_state(0, row, 1, 3, HISTORIES[3])
    memory.copy_state(0, row, 0, 1)
    assert memory.read_state(0, row, 1, 3, HISTORIES[3]) == HISTORIES[3]


# -- transfers -------------------------------------------------------------------------


def test_copies_hold_what_the_source_held_when_they_were_made() -> None:
    memory, _ = written()
    payload = memory.store([1, 2])
    memory.handed_out([1, 2, 3])
    memory.load(payload, [5, 6])
    assert memory.read(0, Row("r", [5, 6]), range(8), HISTORIES) == HISTORIES[:8]


def test_a_torn_copy_leaves_the_rest_of_the_block() -> None:
    memory, _ = written()
    memory.load(memory.store([1]), [5], num_slots=3)
    assert memory.read(0, Row("r", [5]), range(3), HISTORIES) == HISTORIES[:3]
    with pytest.raises(ContentError, match="slot 3 holds never written"):
        memory.read(0, Row("r", [5]), [3], HISTORIES)


def test_transfers_use_blocks_that_somebody_keeps() -> None:
    memory, _ = written()
    payload = memory.store([1])
    memory.in_use = lambda block: block == 1
    for act in (lambda: memory.store([2]), lambda: memory.load(payload, [2])):
        with pytest.raises(ContentError, match=r"(reads|writes) block 2, which"):
            act()
    with pytest.raises(ContentError, match="transfer writes the null block"):
        memory.load(payload, [0])


# -- the declared table ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "position", "first"),
    [
        (full(), 9, 0),
        (mla(), 9, 0),
        (sink(4), 9, 0),
        (window(4), 9, 6),
        (window(4), 2, 0),
        (window(1), 9, 9),
        (chunk(4), 9, 8),
        (chunk(4), 8, 8),
        (chunk(6), 11, 6),
        (UniformTypeKVCacheSpecs(4, {"a": window(4), "b": window(4)}), 9, 6),
    ],
)
def test_first_position_read(spec: KVCacheSpec, position: int, first: int) -> None:
    group = group_model(0, spec)
    assert group.keeps_tokens
    assert group.first_read(position) == first


@pytest.mark.parametrize("spec", [mamba("align"), cross()])
def test_kinds_without_token_slots(spec: KVCacheSpec) -> None:
    assert not group_model(0, spec).keeps_tokens


def test_a_spec_that_the_table_lacks() -> None:
    class Odd(KVCacheSpec):
        pass

    with pytest.raises(ConfigError, match="Odd has no entry"):
        group_model(0, Odd(4))


def test_void_blocks() -> None:
    memory, _ = written()
    memory.poison([2])
    assert memory.is_void(2, Void.POISONED)
    assert memory.is_void(5, Void.POISONED, Void.UNWRITTEN)
    assert not memory.is_void(1, Void.POISONED, Void.UNWRITTEN)
