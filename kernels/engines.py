"""The choice between numba and what does without it, for all host operations."""

import functools
import importlib
import logging
from types import ModuleType
from typing import Literal, TypeAlias

from kvplugin.errors import ConfigError, unknown_name

logger = logging.getLogger("vllm.kvplugin.kernels")

Engine: TypeAlias = Literal["auto", "numba", "numpy"]
"""``auto`` is numba where it can be imported, numpy elsewhere."""


def choose(engine: str, numba_module: str, numpy_module: ModuleType) -> ModuleType:
    """The module that does the work.

    Args:
        engine: an `Engine`.
        numba_module: in `kvplugin.kernels`; imported, which compiles it or reads it
            from numba's cache, only if it is wanted. Python's import lock makes that
            once a process.
        numpy_module: what serves without numba.

    Raises:
        ConfigError: `engine` is unknown, or is numba where numba can't be used.
    """
    if engine not in ("auto", "numba", "numpy"):
        raise unknown_name("copy engine", engine, ("auto", "numba", "numpy"), "engine")
    if engine == "numpy":
        return numpy_module
    found = _import(numba_module)
    if isinstance(found, ModuleType):
        return found
    if engine == "numba":
        raise ConfigError(
            f"engine 'numba' can't be used ({found}): install numba, or set engine "
            "to 'auto'"
        ) from found
    _warn(str(found))
    return numpy_module


@functools.cache
def _import(module: str) -> ModuleType | ImportError:
    try:
        return importlib.import_module(f"kvplugin.kernels.{module}")
    except ImportError as error:
        return error


@functools.cache
def _warn(why: str) -> None:
    """Once a process, whatever operations it uses."""
    logger.warning(
        "numba can't be used (%s): copies of KV blocks go through numpy, at a third "
        "of the speed",
        why,
    )
