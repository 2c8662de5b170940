"""What `kvplugin doctor` finds out: versions, and every name of vLLM's we bind."""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, entry_points, version

from kvplugin.integration.vllm.environment import is_disabled
from kvplugin.integration.vllm.versions import (
    PROBES,
    TESTED_VERSIONS,
    vllm_version,
)

_LIBRARIES = ("torch", "numba", "numpy", "triton", "nixl", "pluggy", "msgspec")


class Verdict(StrEnum):
    OK = "ok"
    NOTE = "note"
    """Works, with less or untested."""
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's report."""

    verdict: Verdict
    subject: str
    detail: str


def examine() -> Iterator[Finding]:
    """Look at this environment; imports vLLM, which takes some seconds."""
    yield Finding(Verdict.OK, "python", sys.version.split()[0])
    yield from map(_library, ("kvplugin", *_LIBRARIES))
    installed = vllm_version()
    yield _vllm(installed)
    yield _entry_point()
    if is_disabled():
        yield Finding(Verdict.NOTE, "KVPLUGIN_DISABLE", "every entry point is inert")
    if installed is not None:
        for probe in PROBES:
            missing = probe.missing()
            yield Finding(
                Verdict.FAIL if missing else Verdict.OK,
                f"{probe.module}.{probe.name}",
                f"{probe.feature} is off: {missing}" if missing else probe.feature,
            )


def _library(name: str) -> Finding:
    try:
        return Finding(Verdict.OK, name, version(name))
    except PackageNotFoundError:
        return Finding(Verdict.NOTE, name, "not installed")


def _vllm(installed: str | None) -> Finding:
    tested = ", ".join(TESTED_VERSIONS)
    if installed is None:
        return Finding(Verdict.FAIL, "vllm", f"not installed (tested: {tested})")
    if installed.split("+")[0] in TESTED_VERSIONS:
        return Finding(Verdict.OK, "vllm", f"{installed} (tested: {tested})")
    return Finding(Verdict.NOTE, "vllm", f"{installed} is untested (tested: {tested})")


def _entry_point() -> Finding:
    if not entry_points(group="vllm.general_plugins", name="kvplugin"):
        return Finding(
            Verdict.FAIL,
            "vllm.general_plugins",
            "kvplugin is not registered: reinstall",
        )
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "kvplugin" not in allowed.split(","):
        return Finding(
            Verdict.NOTE,
            "vllm.general_plugins",
            f"VLLM_PLUGINS={allowed} leaves kvplugin out: use kv_connector_module_path",
        )
    return Finding(Verdict.OK, "vllm.general_plugins", "kvplugin is registered")
