"""Units of access, pieces and ids, as the kernels that move bytes share them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

import torch

from kvplugin.kernels import words

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("numbers", "nbytes"),
    [
        ((), 16),
        ((0,), 16),
        ((16, 4096), 16),
        ((1 << 62,), 16),
        ((48, 24), 8),
        ((656, 132), 4),
        ((4096, 0, 6), 2),
        ((4096, 1), 1),
        ((-8, 16), 8),
    ],
)
def test_access_bytes(numbers: tuple[int, ...], nbytes: int) -> None:
    assert words.access_bytes(*numbers) == nbytes


@settings(deadline=None)
@given(st.lists(st.integers(-(2**62), 2**62)))
def test_access_bytes_is_the_widest(numbers: list[int]) -> None:
    nbytes = words.access_bytes(*numbers)
    assert nbytes in (1, 2, 4, 8, 16)
    assert all(number % nbytes == 0 for number in numbers)
    assert nbytes == 16 or any(number % (2 * nbytes) for number in numbers)


@pytest.mark.parametrize("unit", [1, 2, 4, 8, 16])
def test_a_unit_is_made_of_elements(unit: int) -> None:
    tile = words.tile(unit)
    assert tile["per"] * tile["element"].primitive_bitwidth == unit * 8


@pytest.mark.parametrize("unit", [1, 4, 16])
@pytest.mark.parametrize("units", [1, 511, 512, 513, 1024, 1025, 5000])
def test_pieces_cover_a_run_once(unit: int, units: int) -> None:
    limit = words.tile(unit)["units"] * unit
    end = 0
    for offset, nbytes in words.pieces(units * unit, unit):
        assert offset == end
        assert 0 < nbytes <= limit
        assert nbytes % unit == 0
        end = offset + nbytes
    assert end == units * unit


def test_programs() -> None:
    assert words.programs(0) == (1,)
    assert words.programs(7) == (7,)
    assert words.programs(1 << 40) == (words.PROGRAMS,)


def test_a_tensor_on_the_device_is_not_looked_into() -> None:
    ids = torch.tensor([7, 7, -1])
    sources, targets = words.pairs_on(CPU, ids, ids, 2, 2)
    assert torch.equal(sources, ids)
    assert torch.equal(targets, ids)
    assert torch.equal(words.ids_on(CPU, ids, 2), ids)


def test_strided_ids_become_contiguous() -> None:
    found = words.ids_on(CPU, torch.arange(6)[::2], 6)
    assert found.is_contiguous()
    assert found.tolist() == [0, 2, 4]


def test_ids_from_host_memory_are_checked_and_copied() -> None:
    given_ids = np.array([3, 1])
    sources, targets = words.pairs_on(CPU, given_ids, range(2), 4, 4)
    assert dict(zip(targets.tolist(), sources.tolist(), strict=True)) == {0: 3, 1: 1}
    found = words.ids_on(CPU, given_ids, 4)
    given_ids[:] = 0
    assert found.tolist() == [3, 1]


META = torch.device("meta")


@pytest.mark.parametrize(
    ("source_ids", "target_ids", "message"),
    [
        ([0, 1], [0], "2 source ids do not pair with 1 target ids"),
        ([4], [0], "source id 4 is out of range: there are 4 chunks, 0 to 3"),
        ([0], [-1], "target id -1 is out of range"),
        ([0, 0], [1, 1], "target id 1 appears more than once"),
        ([0.5], [0], "source ids must be a flat list of integers"),
        (torch.zeros(2).long(), torch.zeros(1).long(), "2 source ids do not pair"),
        (torch.zeros(1).int(), torch.zeros(1).long(), "source ids on a device .*int32"),
        (
            torch.zeros(1).long(),
            torch.zeros(1, 1).long(),
            r"target ids on a device must be a flat int64 tensor.*\(1, 1\)",
        ),
        (torch.zeros(1).long(), [0], "both be tensors on cpu"),
        ([0], torch.zeros(1).long(), "both be tensors on cpu"),
        (
            torch.zeros(1).long(),
            torch.zeros(1, device=META).long(),
            "both be tensors on cpu",
        ),
    ],
)
def test_bad_pairs(source_ids: object, target_ids: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        words.pairs_on(CPU, source_ids, target_ids, 4, 4, "chunks")


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([4], "block id 4 is out of range: there are 4 blocks, 0 to 3"),
        ([-1], "block id -1 is out of range"),
        ([[0]], "block ids must be a flat list of integers"),
        (torch.zeros(1), "block ids on a device must be a flat int64 tensor"),
    ],
)
def test_bad_ids(ids: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        words.ids_on(CPU, ids, 4)
