"""What `kvplugin doctor` finds out: versions, and every name of vLLM's we bind."""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, entry_points, version

from kvplugin.integration.vllm.environment import is_disabled
from kvplugin.integration.vllm.failures import MATRIX, Channel
from kvplugin.integration.vllm.versions import (
    PROBES,
    TESTED_VERSIONS,
    Probe,
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
        yield from _failed_loads(installed)
        yield from (_bound(probe, installed) for probe in PROBES)


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


def _failed_loads(installed: str) -> Iterator[Finding]:
    """What a load that failed ends as here."""
    for row in MATRIX:
        if installed.startswith(row.vllm):
            scheduler = row.scheduler.replace("`", "")
            verdict = Verdict.NOTE if row.channel is Channel.NONE else Verdict.OK
            yield Finding(
                verdict,
                f"failed loads, groups: {row.groups}, scheduler: {scheduler}",
                f"said by {row.channel}; recompute: {row.recompute}; fail: {row.fail}",
            )


def _bound(probe: Probe, installed: str) -> Finding:
    """A name of vLLM's, and whether it is as expected."""
    name = f"{probe.module}.{probe.name}"
    if not (missing := probe.missing()):
        return Finding(Verdict.OK, name, probe.feature)
    if probe.lacked_by and installed.startswith(probe.lacked_by):
        return Finding(Verdict.NOTE, name, f"{probe.feature}: not in this version")
    return Finding(Verdict.FAIL, name, f"{probe.feature} is off: {missing}")


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
