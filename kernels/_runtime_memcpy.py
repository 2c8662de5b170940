"""Asynchronous copies by the CUDA runtime, or HIP's, that torch has loaded.

Through ctypes, so that nothing is compiled. Signatures, by source:

- ``cudaMemcpyBatchAsync``: `cuda_runtime_api.h` and `driver_types.h` of CUDA 13.0 and
  13.1 (8 arguments) and of 12.8 and 12.9, which have a ninth, ``size_t *failIdx``,
  before the stream, under the same name; the runtime's version tells which. A runtime
  may be newer than the driver, which needs 12.8 too. It refuses the legacy default
  stream (the header) and cannot be captured into a graph (cuda.core, `copy_batch`).
- ``hipMemcpyBatchAsync``: `hip_runtime_api.h` of HIP 7.1, 9 arguments as CUDA 12.8, and
  so in references up to 10.2. Attributes are "not supported": none are given.
- ``cudaMemcpyAsync`` and ``hipMemcpyAsync``, one a descriptor, where there is neither.
"""

import ctypes
from collections.abc import Callable, Iterator
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from pathlib import Path
from typing import Any, Final

from kvplugin.errors import ConfigError
from kvplugin.kernels.region import Ids

CALL_COPIES: Final = 4096
"""Descriptors of one batch, at most. Not tuned: HIP 7.1 to 7.15 is reported to fault
above 4,096 to 8,192 (rocm-systems, pull request 9915), CUDA 13.0 with driver 580 at
51,828 (vLLM issue 49276)."""

BATCH_SINCE: Final = 12080
WITHOUT_FAIL_INDEX: Final = 13000
"""Versions of CUDA, as major times 1000 and minor times 10."""

LEGACY_STREAM: Final = 1
"""cudaStreamLegacy; 0 means the same."""

_DEFAULT_KIND: Final = 4
"""cudaMemcpyDefault: addresses tell the direction."""
_NOT_SUPPORTED: Final = 801
"""cudaErrorNotSupported and hipErrorNotSupported."""
_STREAM_ORDER: Final = 1
"""cudaMemcpySrcAccessOrderStream: a store reads what the stream has waited for."""
_OVERLAP: Final = 1
"""cudaMemcpyFlagPreferOverlapWithCompute: a hint to leave multiprocessors alone."""

_LIBRARIES: Final = {"cuda": "libcudart", "hip": "libamdhip64"}


class _Location(ctypes.Structure):
    """struct cudaMemLocation; zero where memory lies where it lies."""

    _fields_ = (("type", c_int), ("id", c_int))


class _Attributes(ctypes.Structure):
    """struct cudaMemcpyAttributes."""

    _fields_ = (
        ("src_access_order", c_int),
        ("src_hint", _Location),
        ("dst_hint", _Location),
        ("flags", c_uint),
    )


class RuntimeMemcpy:
    """`MemcpyApi` of a loaded runtime.

    Args:
        library: exports the runtime's functions.
        prefix: of their names: ``cuda`` or ``hip``.
        batch: False: one call a descriptor, as memory needs that is not pinned (what
            a batch does with it depends on the driver).
    """

    def __init__(
        self, library: ctypes.CDLL, prefix: str = "cuda", *, batch: bool = True
    ) -> None:
        self._library = library
        self._prefix = prefix
        arguments = (c_void_p, c_void_p, c_size_t, c_int, c_void_p)
        self._copy = self._function("MemcpyAsync", *arguments)
        self._text = self._function("GetErrorString", c_int, returns=c_char_p)
        self._forget = self._function("GetLastError")
        self._fails = prefix == "hip" or self._version("Runtime") < WITHOUT_FAIL_INDEX
        self._batch = self._find_batch() if batch else None

    @property
    def batches(self) -> bool:
        """Whether many descriptors go in one call."""
        return self._batch is not None

    def copy_batch(self, targets: Ids, sources: Ids, sizes: Ids, stream: int) -> str:
        """Launch the copies; see `dma.MemcpyApi`."""
        for start in range(0, len(sizes), CALL_COPIES):
            part = slice(start, start + CALL_COPIES)
            reason = self._launch(targets[part], sources[part], sizes[part], stream)
            if reason:
                return reason
        return ""

    def _launch(self, targets: Ids, sources: Ids, sizes: Ids, stream: int) -> str:
        batch = self._batch
        if batch is None or stream <= LEGACY_STREAM:
            return self._one_by_one(targets, sources, sizes, stream)
        failed = c_size_t(len(sizes))
        arrays = [array.ctypes.data for array in (targets, sources, sizes)]
        status = batch(*arrays, len(sizes), failed, stream)
        if status == _NOT_SUPPORTED:
            # Of this driver or device, for good. Copying again what it may have taken
            # writes the same bytes.
            self._forget()
            self._batch = None
            return self._one_by_one(targets, sources, sizes, stream)
        return self._reason(status, failed.value, sizes)

    def _one_by_one(self, targets: Ids, sources: Ids, sizes: Ids, stream: int) -> str:
        rows = zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True)
        for index, (target, source, nbytes) in enumerate(rows):
            status = self._copy(target, source, nbytes, _DEFAULT_KIND, stream)
            if status:
                return self._reason(status, index, sizes)
        return ""

    def _reason(self, status: int, index: int, sizes: Ids) -> str:
        if not status:
            return ""
        # Else torch would raise the runtime's last error at a later launch of its own.
        self._forget()
        text = (self._text(status) or b"no text").decode(errors="replace")
        where = ""
        if index < len(sizes):
            where = f", at copy {index + 1} of {len(sizes)} ({sizes[index]} bytes)"
        return f"{text} (error {status}{where})"

    def _find_batch(self) -> Callable[..., int] | None:
        """A call of (targets, sources, sizes, count, failed, stream)."""
        if not hasattr(self._library, f"{self._prefix}MemcpyBatchAsync"):
            return None
        cuda = self._prefix == "cuda"
        if cuda and min(map(self._version, ("Runtime", "Driver"))) < BATCH_SINCE:
            return None
        numbers = POINTER(c_size_t)
        copies = (c_void_p, c_void_p, c_void_p, c_size_t)
        attributes = (POINTER(_Attributes), numbers, c_size_t)
        fail_index = (numbers,) if self._fails else ()
        function = self._function(
            "MemcpyBatchAsync", *copies, *attributes, *fail_index, c_void_p
        )
        given = _Attributes(src_access_order=_STREAM_ORDER, flags=_OVERLAP)
        first = c_size_t(0)

        def call(
            targets: int,
            sources: int,
            sizes: int,
            count: int,
            failed: c_size_t,
            stream: int,
        ) -> int:
            how = (byref(given), byref(first), 1) if cuda else (None, byref(first), 0)
            where = (byref(failed),) if self._fails else ()
            status: int = function(targets, sources, sizes, count, *how, *where, stream)
            return status

        return call

    def _function(self, name: str, *arguments: Any, returns: Any = c_int) -> Any:
        function = getattr(self._library, self._prefix + name)
        function.argtypes, function.restype = arguments, returns
        return function

    def _version(self, of: str) -> int:
        """Of the runtime, or of CUDA as the driver knows it; 0 if it doesn't say."""
        version = c_int(0)
        self._function(f"{of}GetVersion", POINTER(c_int))(byref(version))
        return version.value


def open_runtime(*, batch: bool = True) -> RuntimeMemcpy:
    """The runtime that torch has loaded.

    Args:
        batch: as `RuntimeMemcpy`.

    Raises:
        ConfigError: there is none, or it is linked into torch and can't be called.
    """
    import torch

    prefix = "hip" if torch.version.hip else "cuda"
    return RuntimeMemcpy(find_library(prefix), prefix, batch=batch)


def find_library(prefix: str) -> ctypes.CDLL:
    """The runtime among what this process has loaded, visible to all or not.

    torch's own dependencies are not always visible (pytorch issue 43006), so the
    process's mappings are asked too; nothing is loaded that is not there already.

    Raises:
        ConfigError: there is none.
    """
    process = ctypes.CDLL(None)
    if hasattr(process, f"{prefix}MemcpyAsync"):
        return process
    for path in _loaded_files():
        if path.name.startswith(_LIBRARIES[prefix]):
            return ctypes.CDLL(str(path))
    import torch

    raise ConfigError(
        f"torch {torch.__version__} has loaded no {_LIBRARIES[prefix]}, by which DMA "
        "is asked for: install a build of torch for this GPU that links its runtime as "
        "a shared library"
    )


def _loaded_files() -> Iterator[Path]:
    """Files that this process has mapped, where the system says (Linux)."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    for line in lines:
        _, _, path = line.partition("/")
        if path:
            yield Path("/" + path)
