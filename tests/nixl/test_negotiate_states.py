"""States of other numbers of ranks, or of which not all is alike."""

import pytest
from msgspec import structs

from kvplugin.connectors.negotiate import negotiate
from kvplugin.connectors.nixl.descriptor import LayerMemory
from kvplugin.contract import GroupKind
from tests.nixl.memories import Engine
from tests.nixl.test_negotiate import changed, engine, reasons


def states(tp: int = 1, gap: int = 0) -> Engine:
    return engine(kinds=[GroupKind.MAMBA], sizes=[8], tp=tp, gap=gap)


def test_states_on_other_numbers_of_ranks() -> None:
    for here, there, ranks in ((2, 1, ["0"]), (1, 2, ["0", "1"]), (4, 2, ["0"])):
        sides = [states(tp).descriptor() for tp in (here, there)]
        said = "".join(f", from rank {rank}" for rank in ranks)
        assert negotiate(*sides).summary == f"2 layers of states, part by part{said}", (
            sides
        )


@pytest.mark.parametrize("unknown", [{0}, {1}, {0, 1}])
def test_states_that_nobody_knows_on_other_numbers_of_ranks(unknown: set[int]) -> None:
    def without_parts(layer: LayerMemory) -> LayerMemory:
        return structs.replace(layer, state=[])

    sides = [
        changed(states(tp), without_parts) if i in unknown else states(tp).descriptor()
        for i, tp in enumerate((2, 1))
    ]
    found = reasons(*sides)
    assert "tensor-parallel ranks of a recurrent state: 2 here, 1 there" in found[0]
    assert "--tensor-parallel-size" in found[0]
    assert "bytes of a page, and of its runs" in found[1]
    # As many ranks: the page is the same, whoever knows its parts.
    sides[1] = changed(states(2), without_parts)
    assert negotiate(*sides).summary == "2 layers moved as they are"


@pytest.mark.parametrize(
    ("field", "value"),
    [("name", "y"), ("row_bytes", 4), ("total_rows", 16), ("places", 2)],
)
def test_states_of_other_rows(field: str, value: object) -> None:
    def other(layer: LayerMemory) -> LayerMemory:
        last = layer.state[-1]._replace(**{field: value})
        return structs.replace(layer, state=[*layer.state[:-1], last])

    (reason,) = reasons(states().descriptor(), changed(states(), other))
    assert "layers 0.0, 0.1: parts of a recurrent state" in reason
    assert f"{value!r}" in reason


def test_states_in_other_blocks() -> None:
    kinds = [GroupKind.MAMBA]
    sides = [engine(kinds=kinds, sizes=[n]).descriptor() for n in (256, 512)]
    (reason,) = reasons(*sides)
    assert "block size: 256 here, 512 there" in reason
    assert "a recurrent state has no rows of tokens" in reason
    assert "start both with the larger as --block-size" in reason


def test_states_in_another_order() -> None:
    def other(layer: LayerMemory) -> LayerMemory:
        return structs.replace(layer, interior="state/DS")

    (reason,) = reasons(states().descriptor(), changed(states(), other))
    assert "inside of a page: 'state' here, 'state/DS' there" in reason
    assert "VLLM_SSM_CONV_STATE_LAYOUT" in reason


def test_states_of_other_pages_on_as_many_ranks() -> None:
    sides = states(2).descriptor(), states(2, gap=4).descriptor()
    assert negotiate(*sides).summary == "2 layers of states, part by part"
