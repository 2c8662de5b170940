"""The binding asks a runtime for what its header says, checked by a C compiler."""

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvplugin.errors import ConfigError
from kvplugin.kernels._runtime_memcpy import (
    _LIBRARIES,
    CALL_COPIES,
    RuntimeMemcpy,
    find_library,
    open_runtime,
)

COMPILER = shutil.which("cc") or shutil.which("gcc")
SOURCE = Path(__file__).with_name("fake_runtime.c")
STREAM = 0x7F00_1234_5678
"""A pointer that 32 bits do not hold."""
SIZES = [1, 7, 16, 64, 5]
ILLEGAL = "an illegal memory access was encountered (error 700"

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")

Build = Callable[..., ctypes.CDLL]
LOOP = 4
"""cudaMemcpyDefault, which the fake logs for a single copy."""
BATCH = 99


class Call(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("kind", "count", "stream"),
            *("attributes", "first", "order", "hints", "flags"),
        )
    )


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Compiles a fake runtime; arguments are macros of `fake_runtime.c`."""

    def compile_one(
        version: int,
        name: str = "libfake.so",
        header: Path | None = None,
        **macros: Any,
    ) -> ctypes.CDLL:
        fails = version < 13000
        given = {
            "PREFIX": "cuda" if version else "hip",
            "VERSION": version,
            "DRIVER": version,
            "BATCH": 1,
            "STATUS": 0,
            "FAIL_INDEX": int(fails),
        } | macros
        command = [str(COMPILER), "-shared", "-fPIC", "-Wall", "-Werror", str(SOURCE)]
        command += [f"-D{macro}={value}" for macro, value in given.items()]
        if header:
            of = "CUDA" if version else "HIP"
            command += [f"-D{of}_HEADER", f"-I{header}"]
        built = tmp_path / name
        subprocess.run([*command, "-o", str(built)], check=True)
        return ctypes.CDLL(str(built))

    return compile_one


def calls(library: ctypes.CDLL) -> list[Call]:
    made = ctypes.c_size_t.in_dll(library, "made").value
    return list((Call * 64).in_dll(library, "calls"))[:made]


class Job:
    """Descriptors between two arrays, in another order on each side."""

    def __init__(self, sizes: list[int]) -> None:
        total = sum(sizes)
        self.sizes = np.array(sizes, np.int64)
        self.data = np.random.default_rng(0).integers(1, 256, total, np.uint8)
        self.target = np.zeros(total, np.uint8)
        ends = np.cumsum(self.sizes)
        self.offsets = ends - self.sizes
        self.sources = self.data.ctypes.data + self.offsets
        self.targets = self.target.ctypes.data + total - ends

    def run(self, api: RuntimeMemcpy, stream: int = STREAM) -> str:
        return api.copy_batch(self.targets, self.sources, self.sizes, stream)

    def arrived(self) -> int:
        """How many descriptors, of which those that come later have not."""
        total, done = len(self.data), 0
        for offset, nbytes in zip(self.offsets, self.sizes, strict=True):
            got = self.target[total - offset - nbytes : total - offset]
            if not np.array_equal(got, self.data[offset : offset + nbytes]):
                assert not self.target[: total - offset].any()
                break
            done += 1
        return done


def headers(vendor: str) -> Path:
    """Triton brings those of CUDA from 13.0 and of HIP from 7.1."""
    spec = find_spec("triton")
    if spec is None or spec.origin is None:
        pytest.skip("needs the headers that Triton brings")
    return Path(spec.origin).parent / "backends" / vendor / "include"


@pytest.mark.parametrize("version", [12080, 12090, 13000, 13010])
def test_one_batch_with_attributes(build: Build, version: int) -> None:
    library, job = build(version), Job(SIZES)
    api = RuntimeMemcpy(library)
    assert api.batches
    assert job.run(api) == ""
    assert job.arrived() == len(SIZES)
    [call] = calls(library)
    assert (call.kind, call.count, call.stream) == (BATCH, len(SIZES), STREAM)
    assert (call.attributes, call.first) == (1, 0)
    assert (call.order, call.hints, call.flags) == (1, 0, 1)


@pytest.mark.parametrize(
    ("version", "prefix", "vendor", "driver_types"),
    [
        (13000, "cuda", "nvidia", "driver_types.h"),
        (0, "hip", "amd", "hip/driver_types.h"),
    ],
)
def test_arguments_are_those_of_the_header(
    build: Build, version: int, prefix: str, vendor: str, driver_types: str
) -> None:
    found = headers(vendor)
    library, job = build(version, header=found), Job(SIZES)
    assert job.run(RuntimeMemcpy(library, prefix)) == ""
    assert job.arrived() == len(SIZES)
    [call] = calls(library)
    assert (call.kind, call.count, call.stream) == (BATCH, len(SIZES), STREAM)
    assert (call.order, call.hints, call.flags) == ((1, 0, 1) if version else (0, 0, 0))
    text = (found / driver_types).read_text()
    assert re.search(rf"\b{prefix}MemcpyDefault\s*=\s*{LOOP}\b", text)


def test_constants_are_those_of_the_headers() -> None:
    text = (headers("nvidia") / "driver_types.h").read_text()
    for name, value in (
        ("cudaMemcpySrcAccessOrderStream", "0x1"),
        ("cudaMemcpyFlagPreferOverlapWithCompute", "0x1"),
        ("cudaErrorNotSupported", "801"),
        ("cudaErrorIllegalAddress", "700"),
    ):
        assert re.search(rf"\b{name}\s*=\s*{value}\b", text), name
    text = (headers("amd") / "hip" / "hip_runtime_api.h").read_text()
    assert re.search(r"\bhipErrorNotSupported\s*=\s*801\b", text)


@pytest.mark.parametrize(
    ("version", "vendor", "fails"), [(13000, "nvidia", 1), (0, "amd", 0)]
)
def test_headers_refuse_other_arguments(
    build: Build, version: int, vendor: str, fails: int
) -> None:
    """So that the tests above show something."""
    with pytest.raises(subprocess.CalledProcessError):
        build(version, header=headers(vendor), FAIL_INDEX=fails)


def test_hip_has_a_batch_without_attributes(build: Build) -> None:
    library, job = build(0), Job(SIZES)
    assert job.run(RuntimeMemcpy(library, "hip")) == ""
    assert job.arrived() == len(SIZES)
    [call] = calls(library)
    assert (call.kind, call.stream, call.attributes) == (BATCH, STREAM, 0)


@pytest.mark.parametrize(
    "macros",
    [
        {"version": 12040, "BATCH": 0},
        {"version": 12040},
        {"version": 13000, "DRIVER": 12060},
        {"version": 12090, "DRIVER": 12040},
        {"version": 0, "BATCH": 0},
    ],
)
def test_one_by_one_where_there_is_no_batch(build: Build, macros: dict) -> None:
    library, job = build(**macros), Job(SIZES)
    api = RuntimeMemcpy(library, "cuda" if macros["version"] else "hip")
    assert not api.batches
    assert job.run(api) == ""
    assert job.arrived() == len(SIZES)
    assert [(c.kind, c.stream) for c in calls(library)] == [(LOOP, STREAM)] * len(SIZES)


@pytest.mark.parametrize("stream", [0, 1])
def test_one_by_one_on_the_default_stream(build: Build, stream: int) -> None:
    library, job = build(13000), Job(SIZES)
    api = RuntimeMemcpy(library)
    assert job.run(api, stream) == ""
    assert [(c.kind, c.stream) for c in calls(library)] == [(LOOP, stream)] * len(SIZES)
    assert api.batches


def test_one_by_one_if_asked_to(build: Build) -> None:
    library, job = build(13000), Job(SIZES)
    assert job.run(RuntimeMemcpy(library, batch=False)) == ""
    assert [c.kind for c in calls(library)] == [LOOP] * len(SIZES)


@pytest.mark.parametrize("version", [0, 12080, 13000])
def test_a_batch_that_is_not_supported_is_asked_for_once(
    build: Build, version: int
) -> None:
    library = build(version, STATUS=801)
    api = RuntimeMemcpy(library, "cuda" if version else "hip")
    for _ in range(2):
        job = Job([3, 4])
        assert job.run(api) == ""
        assert job.arrived() == 2
    assert [c.kind for c in calls(library)] == [BATCH, LOOP, LOOP, LOOP, LOOP]
    assert ctypes.c_size_t.in_dll(library, "forgotten").value == 1


@pytest.mark.parametrize(
    ("version", "batch", "where"),
    [
        (0, True, ", at copy 3 of 5 (16 bytes))"),
        (12080, True, ", at copy 3 of 5 (16 bytes))"),
        (13000, True, ")"),
        (13000, False, ", at copy 3 of 5 (16 bytes))"),
    ],
)
def test_a_failure_in_the_runtimes_words(
    build: Build, version: int, batch: bool, where: str
) -> None:
    library, job = build(version), Job(SIZES)
    ctypes.c_size_t.in_dll(library, "good").value = 2
    api = RuntimeMemcpy(library, "cuda" if version else "hip", batch=batch)
    assert job.run(api) == ILLEGAL + where
    assert job.arrived() == 2
    assert ctypes.c_size_t.in_dll(library, "forgotten").value == 1


def test_an_error_without_a_text(build: Build) -> None:
    library = build(13000, STATUS=12345)
    assert Job([1]).run(RuntimeMemcpy(library)) == "no text (error 12345)"


def test_large_batches_are_cut(build: Build) -> None:
    library, job = build(13000), Job([2] * (2 * CALL_COPIES + 3))
    assert job.run(RuntimeMemcpy(library)) == ""
    assert job.arrived() == len(job.sizes)
    assert [c.count for c in calls(library)] == [CALL_COPIES, CALL_COPIES, 3]


def test_nothing_is_launched_after_a_failure(build: Build) -> None:
    library, job = build(13000), Job([1] * (2 * CALL_COPIES))
    ctypes.c_size_t.in_dll(library, "good").value = 5
    assert job.run(RuntimeMemcpy(library)).startswith(ILLEGAL)
    assert len(calls(library)) == 1


def test_no_descriptors(build: Build) -> None:
    library = build(13000)
    assert Job([]).run(RuntimeMemcpy(library)) == ""
    assert calls(library) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch has a GPU's runtime")
def test_a_loaded_runtime_is_found_without_its_path(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loaded for itself alone, as torch may have: no symbol of the whole process."""
    name = f"lib{tmp_path.name}.so"  # once a process: a library stays loaded
    monkeypatch.setitem(_LIBRARIES, "hip", name)
    monkeypatch.setattr(torch.version, "hip", "7.1")
    with pytest.raises(ConfigError, match=f"has loaded no {name}"):
        open_runtime()
    library, job = build(0, name=name + ".7"), Job(SIZES)
    assert not hasattr(ctypes.CDLL(None), "hipMemcpyAsync")
    assert job.run(open_runtime()) == ""
    assert [c.kind for c in calls(library)] == [BATCH]
    assert job.run(open_runtime(batch=False)) == ""
    assert len(calls(library)) == 1 + len(SIZES)


def test_visible_symbols_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    visible = type("Visible", (), {"cudaMemcpyAsync": None})()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: visible if name is None else None)
    assert find_library("cuda") is visible
