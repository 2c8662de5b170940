"""The numba engine of `host.py`: a whole job in one call that holds no GIL.

Importing this module compiles it, or reads it from numba's cache on disk; Python's
import lock makes that once a process, whichever thread comes first.

Small jobs go through libc's memcpy. It writes blocks through the cache, which reads
every target line before it is overwritten; only copies far larger than a block
bypass that. A large job, whose targets would not stay in the cache anyway, is
therefore *streamed*: non-temporal stores write whole lines straight to memory, and
several streams a block keep the processor's prefetchers, which work page by page,
busy from a block's first byte. That turns 55 % of the speed of one contiguous copy
into 97 % (64 KiB blocks in random order; 52 into 91 with 16 KiB).
"""

from collections.abc import Callable
from typing import Any, Final

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.extending import intrinsic

from kvplugin.kernels.region import Copy, Ids, Pairs

if numba.config.DISABLE_JIT:
    raise ImportError("NUMBA_DISABLE_JIT turns numba's compiler off")

# Measured on a Xeon with AVX-512, November 2026: one thread, blocks in random order,
# 1 GiB a side, with and without huge pages.
STREAM_JOB_BYTES: Final = 4 << 20
"""A job of this size is streamed. Where source and target are cached, memcpy is twice
as fast at 1 MiB and no faster at 4; where they are not, streaming wins at both."""
STREAM_PIECE_BYTES: Final = 1024
"""Shorter runs are left to memcpy."""
SPAN_BYTES: Final = 64 << 10
"""What is streamed at once. Four times as much is up to 10 % slower, a quarter 4 %."""
PAGE_BYTES: Final = 4096
"""Eight streams gain 2 % over four, but not if they begin within a page."""
LINE_BYTES: Final = 64
"""One store, at an address that is a multiple of it."""

_Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
_jit: _Decorator = numba.njit
_intrinsic: _Decorator = intrinsic

_memcpy = numba.types.ExternalFunction(
    "memcpy",
    numba.types.intp(numba.types.intp, numba.types.intp, numba.types.intp),
)


def _store_line_codegen(context: Any, builder: Any, _: Any, args: Any) -> Any:
    line = ir.VectorType(ir.IntType(64), LINE_BYTES // 8)
    target, source = (builder.inttoptr(arg, line.as_pointer()) for arg in args)
    store = builder.store(builder.load(source, align=1), target, align=LINE_BYTES)
    hint = builder.module.add_metadata([ir.IntType(32)(1)])
    store.set_metadata("nontemporal", hint)
    return context.get_dummy_value()


def _fence_codegen(context: Any, builder: Any, *_: Any) -> Any:
    builder.fence("seq_cst")
    return context.get_dummy_value()


@_intrinsic
def _stream_line(_: Any, target: Any, source: Any) -> Any:
    """Copy one line past the cache; numba calls this for a signature."""
    signature = numba.types.void(numba.types.intp, numba.types.intp)
    return signature, _store_line_codegen


@_intrinsic
def _fence(_: Any) -> Any:
    """Order streamed stores, which are weakly ordered, before what follows."""
    return numba.types.void(), _fence_codegen


@_jit
def _stream(target: int, source: int, nbytes: int) -> None:
    """Copy `nbytes`, at least a line, in spans of four or eight streams abreast."""
    done = -target % LINE_BYTES
    _memcpy(target, source, done)
    step = 2 * LINE_BYTES
    while nbytes - done >= 4 * step:
        span = min(nbytes - done, SPAN_BYTES)
        streams = 8 if span >= 8 * PAGE_BYTES else 4
        width = span // (streams * step) * step
        for offset in range(done, done + width, step):
            for stream in range(streams):
                at = offset + stream * width
                _stream_line(target + at, source + at)
                _stream_line(target + at + LINE_BYTES, source + at + LINE_BYTES)
        done += streams * width
    _memcpy(target + done, source + done, nbytes - done)


@_jit
def _copy_run(target: int, source: int, nbytes: int, streamed: bool) -> None:
    if streamed and nbytes >= STREAM_PIECE_BYTES:
        _stream(target, source, nbytes)
    else:
        _memcpy(target, source, nbytes)


@_jit
def _run_end(source_ids: Ids, target_ids: Ids, first: int) -> int:
    """One past the last pair that goes up in step with pair `first`."""
    end = first + 1
    while (
        end < len(target_ids)
        and source_ids[end] == source_ids[end - 1] + 1
        and target_ids[end] == target_ids[end - 1] + 1
    ):
        end += 1
    return end


def _copy_blocks(table: Ids, source_ids: Ids, target_ids: Ids, streamed: bool) -> None:
    first = 0
    while first < len(target_ids):
        end = _run_end(source_ids, target_ids, first)
        for region in range(len(table)):
            source_stride, target_stride = table[region, 1], table[region, 3]
            source = table[region, 0] + source_ids[first] * source_stride
            target = table[region, 2] + target_ids[first] * target_stride
            nbytes = table[region, 4]
            if source_stride == nbytes == target_stride:
                _copy_run(target, source, (end - first) * nbytes, streamed)
            else:
                for block in range(end - first):
                    _copy_run(
                        target + block * target_stride,
                        source + block * source_stride,
                        nbytes,
                        streamed,
                    )
        first = end
    _fence()


def _compile() -> Callable[[Ids, Ids, Ids, bool], None]:
    """`_copy_blocks` in machine code, from numba's cache on disk if there is one."""
    signature = "void(int64[:, ::1], int64[::1], int64[::1], boolean)"
    compiled: Any
    try:
        compiled = numba.njit(signature, nogil=True, cache=True)(_copy_blocks)
    except (OSError, RuntimeError):
        # The cache's folder can't be written to: compile for this process alone.
        compiled = numba.njit(signature, nogil=True)(_copy_blocks)
    # The first call costs some milliseconds more, which no copy should have to pay.
    no_ids = np.empty(0, np.int64)
    compiled(np.empty((0, 5), np.int64), no_ids, no_ids, False)
    return compiled


_compiled_copy_blocks: Final = _compile()


def bind(pairs: Pairs) -> Copy:
    """A function that copies blocks from the pairs' sources to their targets."""
    rows = [(s.address, s.stride, t.address, t.stride, s.nbytes) for s, t in pairs]
    table = np.array(rows, dtype=np.int64)
    block_bytes = sum(source.nbytes for source, _ in pairs)

    def copy(source_ids: Ids, target_ids: Ids) -> None:
        streamed = len(target_ids) * block_bytes >= STREAM_JOB_BYTES
        _compiled_copy_blocks(table, source_ids, target_ids, streamed)

    return copy
