"""What a soak has seen, and whether that is as it should be."""

from dataclasses import dataclass, field
from statistics import median
from typing import Final

_MIB: Final = 1 << 20
GROWTH_MIB: Final = 24.0
"""Of resident memory that the second half may bring, see `Outcome.growth_mib`.

Host memory and the engine's pool are full long before; what still moves is the
allocator's, a few MiB either way. A request state that stays behind with its block
hashes has some ten KiB: at ten requests a second that is 60 MiB in ten minutes."""
SETTLED_S: Final = 300.0
"""Runs shorter than this are all start: memory is told, not judged."""


@dataclass
class Outcome:
    """Of one run."""

    seconds: float = 0.0
    requests: int = 0
    answered: int = 0
    aborted: int = 0
    cached_tokens: int = 0
    prompt_tokens: int = 0
    resets: int = 0
    resets_of_both: int = 0
    resets_while_running: int = 0
    steps: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the connector, and preemptions."""
    wrong: list[str] = field(default_factory=list)
    """Answers that are not those of the engine without a connector."""
    held: dict[str, int] = field(default_factory=dict)
    """What is still in use after the last answer; all should be 0."""
    threads: list[str] = field(default_factory=list)
    """Of the connector, after the engine's end."""
    damage_seen: int | None = None
    """Answers from damaged host memory that were found to be wrong; None where nothing
    was damaged."""
    memory: list[tuple[float, float]] = field(default_factory=list)
    """Seconds and MiB of resident memory."""

    @property
    def growth_mib(self) -> float:
        """Median of the last eighth of the samples less that of an eighth from the
        middle on."""
        sizes = [mib for _, mib in self.memory]
        eighth = max(len(sizes) // 8, 1)
        middle = len(sizes) // 2
        return median(sizes[-eighth:]) - median(sizes[middle : middle + eighth])

    def complaints(self) -> list[str]:
        """What is not as it should be; empty if all is well."""
        found = [
            f"{len(self.wrong)} wrong answers, such as {w}" for w in self.wrong[:3]
        ]
        if not self.metrics.get("loaded_bytes"):
            found.append("nothing was loaded from host memory")
        if not self.faults:
            found.append("no copy went wrong")
        if self.damage_seen == 0:
            found.append("damaged host memory was not noticed")
        found += [f"{n} {what} still in use" for what, n in self.held.items() if n]
        found += [f"thread {name} is left" for name in self.threads]
        lost = self.requests - self.answered - self.aborted
        if lost:
            found.append(f"{lost} requests without an end")
        if self.seconds >= SETTLED_S and self.growth_mib > GROWTH_MIB:
            found.append(
                f"memory grew by {self.growth_mib:.0f} MiB in the second half, more "
                f"than {GROWTH_MIB:.0f}"
            )
        return found

    def table(self) -> str:
        """For the terminal."""
        metrics = self.metrics
        faults = ", ".join(f"{n} {what}" for what, n in sorted(self.faults.items()))
        rows = [
            ("seconds, steps", f"{self.seconds:.0f}, {self.steps}"),
            ("requests", f"{self.requests}"),
            ("answered, of these wrong", f"{self.answered}, {len(self.wrong)}"),
            ("aborted", f"{self.aborted}"),
            (
                "prompt tokens, of these hit",
                f"{self.prompt_tokens}, {self.cached_tokens}",
            ),
            ("loaded tokens", f"{metrics.get('loaded_tokens', 0):.0f}"),
            ("loaded MiB", f"{metrics.get('loaded_bytes', 0) / _MIB:.1f}"),
            ("stored MiB", f"{metrics.get('stored_bytes', 0) / _MIB:.1f}"),
            ("evicted host blocks", f"{metrics.get('evicted_blocks', 0):.0f}"),
            ("faults injected", faults or "none"),
            (
                "failed loads, stores",
                f"{metrics.get('failed_loads', 0):.0f}, "
                f"{metrics.get('failed_stores', 0):.0f}",
            ),
            ("preemptions", f"{metrics.get('preemptions', 0):.0f}"),
            (
                "resets: plain, both, running",
                f"{self.resets}, {self.resets_of_both}, {self.resets_while_running}",
            ),
            ("in use at the end", str({k: v for k, v in self.held.items() if v} or 0)),
            ("wrong after damage", self._damage()),
            ("threads left", ", ".join(self.threads) or "none"),
            ("memory first, last MiB", self._memory_ends()),
            ("memory curve MiB", self._curve()),
            ("growth of the second half MiB", f"{self.growth_mib:.1f}"),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)

    def _damage(self) -> str:
        return "not tried" if self.damage_seen is None else f"{self.damage_seen}"

    def _memory_ends(self) -> str:
        sizes = [mib for _, mib in self.memory]
        return f"{sizes[0]:.0f}, {sizes[-1]:.0f}"

    def _curve(self, points: int = 12) -> str:
        step = max(len(self.memory) // points, 1)
        return " ".join(f"{mib:.0f}" for _, mib in self.memory[::step])
