"""What `kvplugin doctor` finds out: versions, and every name of vLLM's we bind."""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

from kvplugin.integration.vllm.environment import is_disabled
from kvplugin.integration.vllm.failures import MATRIX, Channel
from kvplugin.integration.vllm.versions import (
    PROBES,
    TESTED_VERSIONS,
    Probe,
    vllm_version,
)

_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
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
    yield from _same_host(_YAMA)
    yield from _huge_pages(_HUGE_PAGES)
    if installed is not None:
        yield from _cpu_pages()
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


def _same_host(setting: Path) -> Iterator[Finding]:
    """How engines of this machine read from each other."""
    try:
        scope = setting.read_text().strip()
    except OSError:
        scope = "0"  # the kernel has no such rule
    subject = "reads on this machine"
    if scope == "0":
        yield Finding(Verdict.OK, subject, "from process to process, for one user")
    else:
        yield Finding(
            Verdict.NOTE,
            subject,
            f"by NIXL: kernel.yama.ptrace_scope is {scope}; with 0, or CAP_SYS_PTRACE, "
            "they go from process to process, 2 to 4 times as fast",
        )


def _huge_pages(setting: Path) -> Iterator[Finding]:
    """Whether KV in host memory can lie in huge pages."""
    try:
        is_never = "[never]" in setting.read_text()
    except OSError:
        return  # the kernel has none
    subject = "KV in host memory"
    if is_never:
        yield Finding(
            Verdict.NOTE,
            subject,
            f"in small pages, which engines of this machine read half as fast: "
            f"{setting} is never, madvise is enough",
        )
    else:
        yield Finding(Verdict.OK, subject, "P/D moves it into huge pages at the start")


def _cpu_pages() -> Iterator[Finding]:
    """Whether the inside of CPU attention's pages is known, where vLLM has it."""
    import torch

    from kvplugin.integration.vllm.cpu_pages import PageKind, probe

    kind = PageKind(torch.bfloat16, torch.bfloat16, "auto", 128, 64)
    subject = "blocks of CPU attention"
    try:
        import vllm._custom_ops  # noqa: F401  # its operations come with it

        if not hasattr(torch.ops._C, "cpu_attn_reshape_and_cache"):
            return
        order = probe(kind)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        yield Finding(Verdict.NOTE, subject, f"can be moved, not converted: {why}")
        return
    rows = order.key.tokens
    detail = f"packing {order.isa}, {rows} tokens a row: sizes are converted"
    yield Finding(Verdict.OK, subject, detail)


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
