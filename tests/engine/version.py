"""What the tests do differently on vLLM 0.19.1, the other end of the supported range.

Runs in the engine's process; `make test-vllm-019` has that version.
"""

from collections.abc import Mapping
from typing import Any

from kvplugin.integration.vllm.versions import vllm_version


def is_019() -> bool:
    """Whether the installed vLLM is 0.19; does not import it."""
    return (vllm_version() or "").startswith("0.19.")


def arguments_here(engine: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `vllm.LLM` that mean the same on the installed version."""
    arguments = dict(engine)
    if is_019():
        # Beside a connector it switches the manager of several groups off.
        arguments.setdefault("disable_hybrid_kv_cache_manager", False)
        if nbytes := arguments.get("kv_cache_memory_bytes"):
            _give_the_cache(nbytes)
    return arguments


def _give_the_cache(nbytes: int) -> None:
    """It ignores `kv_cache_memory_bytes` on a CPU, and takes whole GiB only."""
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.get_device_total_memory = classmethod(lambda cls, device_id=0: nbytes)
