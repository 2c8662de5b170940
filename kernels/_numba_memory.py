"""What the numba engines are made of: stores that bypass the cache, and runs.

Small jobs go through libc's memcpy. It writes blocks through the cache, which reads
every target line before it is overwritten; only copies far larger than a block
bypass that. A large job, whose targets would not stay in the cache anyway, is
therefore *streamed*: non-temporal stores write whole lines straight to memory, and
several streams a block keep the processor's prefetchers, which work page by page,
busy from a block's first byte. That turns 55 % of the speed of one contiguous copy
into 97 % (64 KiB blocks in random order; 52 into 91 with 16 KiB).

numba's cache on disk notices changes of the file that holds a job's loop, not of this
one: who changes this file removes the ``*.nbi`` files beside its users' bytecode.
"""

from collections.abc import Callable
from typing import Any, Final

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba.extending import intrinsic

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
"""Eight streams gain 2 % over four, but not if they begin within a page. Runs of 4
KiB gain a quarter to a half from one stream instead of four within the page (EPYC
with AVX-512, November 2026)."""
LINE_BYTES: Final = 64
"""The widest store, and what the processor writes to memory at once."""

_Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
jit: _Decorator = numba.njit
_intrinsic: _Decorator = intrinsic

memcpy = numba.types.ExternalFunction(
    "memcpy",
    numba.types.intp(numba.types.intp, numba.types.intp, numba.types.intp),
)


def streams(job_bytes: int) -> bool:
    """Whether a job is large enough to be streamed."""
    return job_bytes >= STREAM_JOB_BYTES


def store_of(width: int, *, streamed: bool) -> Callable[..., Any]:
    """A jit function (target, source) that copies `width` bytes in one store.

    A streamed one goes past the cache, to a target that must be a multiple of
    `width`; the job then ends with a `fence`.
    """

    def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
        words = ir.VectorType(ir.IntType(64), width // 8)
        target, source = (builder.inttoptr(arg, words.as_pointer()) for arg in args)
        value = builder.load(source, align=1)
        store = builder.store(value, target, align=width if streamed else 1)
        if streamed:
            hint = builder.module.add_metadata([ir.IntType(32)(1)])
            store.set_metadata("nontemporal", hint)
        return context.get_dummy_value()

    @_intrinsic
    def store(_: Any, target: Any, source: Any) -> Any:
        """numba calls this for a signature."""
        return numba.types.void(numba.types.intp, numba.types.intp), generate

    return store


def _fence_codegen(context: Any, builder: Any, *_: Any) -> Any:
    builder.fence("seq_cst")
    return context.get_dummy_value()


@_intrinsic
def fence(_: Any) -> Any:
    """Order streamed stores, which are weakly ordered, before what follows."""
    return numba.types.void(), _fence_codegen


_stream_line = store_of(LINE_BYTES, streamed=True)


@jit
def _abreast(span: int) -> int:
    """Streams that share a span: each begins in a page of its own."""
    if span < 4 * PAGE_BYTES:
        return 1
    return 4 if span < 8 * PAGE_BYTES else 8


@jit
def _stream(target: int, source: int, nbytes: int) -> None:
    """Copy `nbytes`, at least a line, in spans of several streams abreast."""
    done = -target % LINE_BYTES
    memcpy(target, source, done)
    step = 2 * LINE_BYTES
    while nbytes - done >= 4 * step:
        span = min(nbytes - done, SPAN_BYTES)
        abreast = _abreast(span)
        width = span // (abreast * step) * step
        for offset in range(done, done + width, step):
            for stream in range(abreast):
                at = offset + stream * width
                _stream_line(target + at, source + at)
                _stream_line(target + at + LINE_BYTES, source + at + LINE_BYTES)
        done += abreast * width
    memcpy(target + done, source + done, nbytes - done)


@jit
def copy_run(target: int, source: int, nbytes: int, streamed: bool) -> None:
    """Copy contiguous bytes, whatever their number and alignment."""
    if streamed and nbytes >= STREAM_PIECE_BYTES:
        _stream(target, source, nbytes)
    else:
        memcpy(target, source, nbytes)


def compile_job(
    loop: Callable[..., None], signature: str, *no_work: object
) -> Callable[..., None]:
    """`loop` in machine code that holds no GIL, from numba's cache on disk if there
    is one.

    Args:
        loop: all of a job.
        signature: its types.
        no_work: arguments with which there is nothing to do. The first call costs
            some milliseconds more, which no job should have to pay.
    """
    compiled: Any
    try:
        compiled = numba.njit(signature, nogil=True, cache=True)(loop)
    except (OSError, RuntimeError):
        # The cache's folder can't be written to: compile for this process alone.
        compiled = numba.njit(signature, nogil=True)(loop)
    compiled(*no_work)
    return compiled
