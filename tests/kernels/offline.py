"""Kernels compiled for GPUs that are not here, and what the machine code says."""

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
AMD_BYTES = {
    "ubyte": 1,
    "sbyte": 1,
    "byte": 1,
    "ushort": 2,
    "short": 2,
    "dword": 4,
    "dwordx2": 8,
    "dwordx3": 12,
    "dwordx4": 16,
    "b8": 1,
    "b16": 2,
    "b32": 4,
    "b64": 8,
    "b128": 16,
}


@dataclass(frozen=True)
class MachineCode:
    """What was generated for one target."""

    target: str
    text: str
    """PTX, or AMD assembly."""
    loads: tuple[int, ...]
    """Bytes of each access to global memory, in order."""
    stores: tuple[int, ...]
    spilled_bytes: int


def compile_for(
    target: str,
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any] | None = None,
    *,
    divisible_by_16: tuple[str, ...] = (),
    num_warps: int = 4,
) -> MachineCode:
    """Compile a kernel (a `triton.jit` function) without a GPU.

    Args:
        target: a key of `TARGETS`.
        kernel: not interpreted: `TRITON_INTERPRET` must be unset.
        signature: type of each argument, e.g. ``*i64``, ``i32``; ``constexpr`` for
            those in `constants`.
        constants: compile-time arguments by name.
        divisible_by_16: arguments (pointers, counts) known to be multiples of 16.
        num_warps: of a program.
    """
    names = list(signature)
    source = ASTSource(
        kernel,
        dict(signature),
        {(names.index(name),): value for name, value in (constants or {}).items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in divisible_by_16},
    )
    compiled = triton.compile(
        source, target=TARGETS[target], options={"num_warps": num_warps}
    )
    if "ptx" in compiled.asm:
        text = compiled.asm["ptx"]
        spilled = _cuda_local_bytes(compiled.asm["cubin"])
        loads, stores = (_ptx_bytes(text, word) for word in ("ld", "st"))
    else:
        text = compiled.asm["amdgcn"]
        spilled = _amd_spills(text)
        loads, stores = (_amd_bytes(text, word) for word in ("load", "store"))
    return MachineCode(target, text, loads, stores, spilled)


def _ptx_bytes(text: str, word: str) -> tuple[int, ...]:
    pattern = rf"\b{word}\.global[.\w:]*?(?:\.v([248]))?\.[bufs](8|16|32|64|128)\b"
    return tuple(
        int(bits) // 8 * int(vector or 1) for vector, bits in re.findall(pattern, text)
    )


def _amd_bytes(text: str, word: str) -> tuple[int, ...]:
    names = re.findall(rf"\b(?:global|buffer|flat)_{word}_(\w+)", text)
    return tuple(AMD_BYTES[name.removesuffix("_d16_hi")] for name in names)


def _amd_spills(text: str) -> int:
    counts = re.findall(r"\.[sv]gpr_spill_count:\s*(\d+)", text)
    scratch = re.findall(r"\.private_segment_fixed_size:\s*(\d+)", text)
    assert counts
    assert scratch
    return sum(map(int, counts)) * 4 + sum(map(int, scratch))


def _cuda_local_bytes(cubin: bytes) -> int:
    """Local memory of a thread: what was spilled, or put on a stack."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [tool, "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        )
    stack, local = re.findall(r"STACK:(\d+)|LOCAL:(\d+)", done.stdout)
    return int(stack[0]) + int(local[1])
