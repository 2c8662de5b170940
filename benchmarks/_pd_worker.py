"""Looks at a connector's worker half from inside its process: how long a step waits."""

import time
from collections.abc import Callable
from typing import Any, Final

WATCHED: Final = {
    "posting": ("bind_connector_metadata", "start_load_kv"),
    "polling": ("get_transfer_results",),
}
"""Calls in which a step may wait for a connector: reads are posted in the one or the
other of the first two."""


class Watch:
    """Mixed into vLLM's worker (``worker_extension_cls``)."""

    def pd_watch(self) -> None:
        """From now on calls are timed."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        connector = get_kv_transfer_group()
        self._pd_seconds: dict[str, list[float]] = {name: [] for name in WATCHED}
        for what, names in WATCHED.items():
            for name in names:
                timed = _timed(getattr(connector, name), self._pd_seconds[what])
                setattr(connector, name, timed)

    def pd_longest(self) -> dict[str, float]:
        """Seconds of the longest call of each since the last time this was asked."""
        longest = {name: max(taken, default=0.0) for name, taken in self._pd_items()}
        for _, taken in self._pd_items():
            taken.clear()
        return longest

    def _pd_items(self) -> list[tuple[str, list[float]]]:
        return list(self._pd_seconds.items())


def _timed(call: Callable[..., Any], taken: list[float]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            taken.append(time.perf_counter() - start)

    return timed
