"""Host memory is there, or refused, and stays where something may still write to it."""

import ctypes
import gc
import mmap
import sys

import pytest

from kvplugin.connectors.offload.config import OffloadConfig
from kvplugin.connectors.offload.memory import (
    HostMemory,
    check_machine_memory,
    machine_memory,
)
from kvplugin.connectors.offload.scheduler import OffloadScheduler
from kvplugin.contract import GroupKind
from kvplugin.errors import CapacityError
from tests.offload.half import engine, group


def is_mapped(address: int) -> bool:
    """Whether this process has a page there."""
    place, resident = ctypes.c_void_p(address), ctypes.c_ubyte()
    pages = ctypes.c_size_t(mmap.PAGESIZE)
    return ctypes.CDLL(None).mincore(place, pages, ctypes.byref(resident)) == 0


def test_it_is_zero_aligned_and_as_large_as_asked_for() -> None:
    memory = HostMemory(100_001)
    assert memory.address % mmap.PAGESIZE == 0
    assert len(memory.view) == memory.nbytes == 100_001
    assert not any(memory.view)
    memory.close()


def test_more_than_the_machine_has_is_refused_with_the_key_to_change() -> None:
    for refuse in (HostMemory, check_machine_memory):
        with pytest.raises(CapacityError, match="lower cpu_bytes_to_use"):
            refuse(1 << 60)


@pytest.mark.parametrize(
    ("ranks", "more", "is_warned"), [(1, 1, False), (4, 0, False), (4, 1, True)]
)
def test_ranks_that_may_share_a_machine_are_warned_of_what_they_have_together(
    caplog: pytest.LogCaptureFixture, ranks: int, more: int, is_warned: bool
) -> None:
    page = machine_memory() // 32
    info = engine(group(GroupKind.FULL, page=page), world_size=ranks)
    OffloadScheduler(info, OffloadConfig(cpu_bytes_to_use=machine_memory() + more))
    said = [text for text in caplog.messages if "cpu_bytes_to_use" in text]
    assert bool(said) == is_warned


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what is mapped")
@pytest.mark.parametrize("abandoned", [True, False])
def test_what_is_abandoned_outlives_whoever_had_it(abandoned: bool) -> None:
    memory = HostMemory(1 << 20)
    address = memory.address
    assert is_mapped(address)
    if abandoned:
        memory.abandon()
    del memory
    gc.collect()
    assert is_mapped(address) == abandoned
