"""Replay of traces through the core: what a policy or a capacity would have brought.

Names are imported when they are first asked for: who only writes a trace, or lists
commands, loads no core.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kvplugin.replay.formats import read_trace as read_trace
    from kvplugin.replay.record import TraceWriter as TraceWriter
    from kvplugin.replay.result import Counts as Counts
    from kvplugin.replay.result import ReplayResult as ReplayResult
    from kvplugin.replay.result import Run as Run
    from kvplugin.replay.result import RunFailedError as RunFailedError
    from kvplugin.replay.runner import Replay as Replay
    from kvplugin.replay.runner import replay as replay
    from kvplugin.replay.settings import ReplaySettings as ReplaySettings
    from kvplugin.replay.trace import Trace as Trace
    from kvplugin.replay.trace import TraceEntry as TraceEntry
    from kvplugin.replay.trace import TraceError as TraceError

_EXPORTS: Final = {
    "formats": ("read_trace",),
    "record": ("TraceWriter",),
    "result": ("Counts", "ReplayResult", "Run", "RunFailedError"),
    "runner": ("Replay", "replay"),
    "settings": ("ReplaySettings",),
    "trace": ("Trace", "TraceEntry", "TraceError"),
}

_MODULE_OF: Final = {
    name: f"{__name__}.{module}" for module, names in _EXPORTS.items() for name in names
}


def __getattr__(name: str) -> Any:
    """Import what is asked for."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
