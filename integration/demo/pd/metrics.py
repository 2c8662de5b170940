"""What the decode server has read so far, from its /metrics."""

import time
import urllib.request
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from kvplugin.errors import KVPluginError
from kvplugin.integration.demo.pd.plan import OURS, THEIRS
from kvplugin.integration.demo.processes import Program

SAMPLES: Final = {
    OURS: (
        "vllm:kvplugin_nixl_read_bytes_total",
        "vllm:kvplugin_nixl_read_seconds_sum",
    ),
    THEIRS: ("vllm:nixl_bytes_transferred_sum", "vllm:nixl_xfer_time_seconds_sum"),
}
"""Samples of bytes and seconds, by connector."""
LIMIT_S: Final = 30.0


class Moved(NamedTuple):
    """By reads from the prefill server, since the start or between two moments."""

    nbytes: int
    seconds: float

    def since(self, before: "Moved") -> "Moved":
        """The difference."""
        return Moved(self.nbytes - before.nbytes, self.seconds - before.seconds)

    @property
    def gigabytes_per_second(self) -> float:
        """0 where nothing was read."""
        return self.nbytes / self.seconds / 1e9 if self.seconds else 0.0


def read_moved(server: Program, connector: str) -> Moved:
    """Totals of a server, over its engines and ranks.

    Raises:
        KVPluginError: it does not answer.
    """
    try:
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=LIMIT_S) as reply:  # noqa: S310
            return moved(reply.read().decode(), SAMPLES[connector])
    except OSError as error:
        raise KVPluginError(f"{server.name} has no metrics: {error}") from error


def moved(page: str, samples: tuple[str, str]) -> Moved:
    """Sums over all labels; 0 for what is not on the page."""
    totals: Mapping[str, float] = dict.fromkeys(samples, 0.0)
    found = dict(totals)
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name in found:
                found[sample.name] += sample.value
    nbytes, seconds = (found[name] for name in samples)
    return Moved(int(nbytes), seconds)


def settled(
    read: Callable[[], Moved],
    before: Moved,
    *,
    limit_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Moved:
    """Totals once they have moved on from `before`, or after `limit_s` as they are.

    An engine tells its front end of a read with the step after it, which may come
    after the answer.
    """
    deadline = clock() + limit_s
    while True:
        now = read()
        if now.nbytes > before.nbytes or clock() >= deadline:
            return now
        sleep(0.1)
