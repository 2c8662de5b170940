"""Copies that go wrong by chance, arranged in the engine's process before it starts."""

import random
import threading
import time
from collections import Counter
from typing import Final

from kvplugin.connectors.offload.host_copies import HostCopies
from kvplugin.contract import CopyJob

TIMEOUT_S: Final = 0.4
"""`transfer_timeout_s` of the engine under test."""
_STALL_S: Final = 3 * TIMEOUT_S
"""Of a copy that outlives its deadline."""
_ODDS: Final = {"failed": 0.04, "torn": 0.04, "slow": 0.06, "stalled": 0.012}
"""Of a copy, while faults are on."""


class Faults:
    """What becomes of copies; drawn by several threads."""

    def __init__(self) -> None:
        self.is_on = False
        self.counts: Counter[str] = Counter()
        self._random = random.Random(0)
        self._lock = threading.Lock()

    def draw(self) -> str:
        """The fault of the next copy; empty for none."""
        with self._lock:
            if not self.is_on:
                return ""
            place = self._random.random()
            for name, odds in _ODDS.items():
                place -= odds
                if place < 0:
                    self.counts[name] += 1
                    return name
            return ""


FAULTS: Final = Faults()
"""Of this process."""


def copies_go_wrong() -> None:
    """From now on copies meet the faults that `FAULTS` draws, while it is on."""
    execute = HostCopies.execute

    def unsafe(self: HostCopies, job: CopyJob) -> int:
        fault = FAULTS.draw()
        if fault == "slow":
            time.sleep(0.02)
        elif fault == "stalled":
            time.sleep(_STALL_S)
        elif fault == "torn":
            execute(self, _first_half(job))
            raise OSError("torn by the soak")
        elif fault == "failed":
            raise OSError("failed by the soak")
        return execute(self, job)

    HostCopies.execute = unsafe  # type: ignore[method-assign]


def _first_half(job: CopyJob) -> CopyJob:
    """Its blocks up to the middle of each group, one at least."""
    parts = []
    for group, engine_ids, host_ids in job.parts:
        some = (len(engine_ids) + 1) // 2
        parts.append((group, engine_ids[:some], host_ids[:some]))
    return job._replace(parts=parts)
