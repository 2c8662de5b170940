"""Memory is pinned in whole pages and units, all of it or none."""

import mmap
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplugin.errors import CapacityError
from kvplugin.kernels.pinned import PIECE_BYTES, CudaRegistrar, PinnedMemory

PAGE = mmap.PAGESIZE
ADDRESS = 16 * PAGE


class FakeRegistrar:
    """Refuses the piece of number `refused`, from 1 on, and what overlaps."""

    def __init__(self, refused: int = 0) -> None:
        self.refused = refused
        self.pinned: dict[int, int] = {}
        self.stuck: set[int] = set()

    def register(self, address: int, nbytes: int) -> str:
        if len(self.pinned) + 1 == self.refused:
            return "out of memory"
        last = max(
            (a + -(-n // PAGE) * PAGE for a, n in self.pinned.items()), default=0
        )
        assert address % PAGE == 0
        assert address >= last, "two pieces share a page"
        self.pinned[address] = nbytes
        return ""

    def unregister(self, address: int) -> str:
        if address in self.stuck:
            return "invalid argument"
        del self.pinned[address]
        return ""


def test_one_piece() -> None:
    registrar = FakeRegistrar()
    memory = PinnedMemory(ADDRESS, 3 * PAGE + 5, registrar)
    assert registrar.pinned == {ADDRESS: 3 * PAGE + 5}
    assert memory.cuts == []
    memory.close()
    assert registrar.pinned == {}
    memory.close()


def test_the_pieces_of_a_large_pool() -> None:
    registrar = FakeRegistrar()
    PinnedMemory(ADDRESS, 2 * PIECE_BYTES + PAGE, registrar)
    assert list(registrar.pinned.values()) == [PIECE_BYTES, PIECE_BYTES, PAGE]


@settings(deadline=None)
@given(
    nbytes=st.integers(1, 100 * PAGE),
    unit=st.integers(1, 12 * PAGE),
    piece=st.integers(1, 40 * PAGE),
)
def test_pieces_cover_all_and_split_no_unit(nbytes: int, unit: int, piece: int) -> None:
    registrar = FakeRegistrar()
    PinnedMemory(ADDRESS, nbytes, registrar, unit_bytes=unit, piece_bytes=piece)
    covered = 0
    for address, size in registrar.pinned.items():
        assert address - ADDRESS == covered
        assert covered % unit == 0
        covered += size
    assert covered == nbytes


@settings(deadline=None)
@given(unit=st.integers(1, 4 * PAGE), piece=st.integers(1, 40 * PAGE))
def test_pieces_keep_to_the_limit_where_units_allow(unit: int, piece: int) -> None:
    registrar = FakeRegistrar()
    PinnedMemory(
        ADDRESS, 50 * PAGE, registrar, unit_bytes=unit * PAGE, piece_bytes=piece
    )
    assert max(registrar.pinned.values()) <= max(piece, unit * PAGE)


@pytest.mark.parametrize("refused", [1, 2, 3])
def test_a_refused_piece_undoes_the_others_and_says_what_to_change(
    refused: int,
) -> None:
    registrar = FakeRegistrar(refused)
    with pytest.raises(CapacityError) as caught:
        PinnedMemory(ADDRESS, 3 * PAGE, registrar, piece_bytes=PAGE)
    assert registrar.pinned == {}
    for words in (
        f"cannot pin {3 * PAGE} bytes",
        f"piece {refused} of 3 ({PAGE} bytes, at byte {(refused - 1) * PAGE})",
        "out of memory",
        "cpu_bytes_to_use",
        "ulimit -l",
    ):
        assert words in str(caught.value)


def test_a_piece_that_stays_pinned_is_logged_and_the_rest_unpinned(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registrar = FakeRegistrar()
    memory = PinnedMemory(ADDRESS, 3 * PAGE, registrar, piece_bytes=PAGE)
    registrar.stuck = {ADDRESS + PAGE}
    memory.close()
    assert set(registrar.pinned) == registrar.stuck
    assert f"{ADDRESS + PAGE:#x} (invalid argument)" in caplog.text


@pytest.mark.parametrize(
    ("address", "numbers", "what"),
    [
        (ADDRESS + 1, {}, "is not at a page"),
        (ADDRESS, {"nbytes": 0}, "nbytes 0"),
        (ADDRESS, {"unit_bytes": 0}, "unit_bytes 0"),
        (ADDRESS, {"piece_bytes": -1}, "piece_bytes -1"),
    ],
)
def test_wrong_numbers(address: int, numbers: dict[str, int], what: str) -> None:
    registrar = FakeRegistrar()
    with pytest.raises(ValueError, match=what):
        PinnedMemory(address, registrar=registrar, **{"nbytes": PAGE, **numbers})
    assert registrar.pinned == {}


def test_the_cuda_registrar(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    calls: list[tuple[object, ...]] = []
    codes = iter([0, 2, 0])

    def register(address: int, nbytes: int, flags: int) -> int:
        calls.append(("register", address, nbytes, flags))
        return next(codes)

    def unregister(address: int) -> int:
        calls.append(("unregister", address))
        return next(codes)

    def zeros(*_: object, device: str) -> None:
        calls.append(("zeros", device))
        raise RuntimeError("the last error")

    runtime = SimpleNamespace(
        cudaHostRegister=register,
        cudaHostUnregister=unregister,
        cudaGetErrorString=lambda code: f"error {code}",
        cudaError=SimpleNamespace(success=0),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "zeros", zeros)
    registrar = CudaRegistrar(1)
    assert registrar.register(ADDRESS, PAGE) == ""
    assert registrar.register(ADDRESS, PAGE) == "error 2"
    assert registrar.unregister(ADDRESS) == ""
    both = ("register", ADDRESS, PAGE, 3)
    assert calls == [both, both, ("zeros", "cuda:1"), ("unregister", ADDRESS)]


def test_cuts_are_where_pieces_meet() -> None:
    memory = PinnedMemory(ADDRESS, 10 * PAGE, FakeRegistrar(), piece_bytes=4 * PAGE)
    assert memory.cuts == [ADDRESS + 4 * PAGE, ADDRESS + 8 * PAGE]
