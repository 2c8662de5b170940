"""What `policy_runs` is asked and answers; free of vLLM: tests import it."""

from dataclasses import dataclass, field
from typing import Any, Final

Group = tuple[str, dict[str, Any]]
VOCABULARY: Final = 90


@dataclass(frozen=True)
class PolicyRun:
    """A workload of shared prefixes, some of them hot, under a configuration."""

    groups: list[Group]
    settings: dict[str, Any] | None = None
    """Of `additional_config["kvplugin"]`; None: vLLM's own class."""
    num_blocks: int = 60
    seed: int = 0
    policy: str = "fcfs"
    in_flight: int = 1
    """Steps under way at a time; more than one needs asynchronous scheduling."""
    steps: int = 80
    environment: dict[str, str] = field(default_factory=dict)
    newer: str = ""
    """A class of vLLM's, `module.Class` below `vllm.v1.core`, that has a method more
    than any version that we know."""
    fails: str = ""
    """A method of ours, `module.Class.method` below `kvplugin`, that raises."""
    block_size: int = 4


@dataclass
class Outcome:
    """What a run came to."""

    kind: str = ""
    error: str = ""
    texts: dict[str, list[int]] = field(default_factory=dict)
    cached: int = 0
    """Tokens that hit when requests were admitted."""
    aborted: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    admitted: list[str] = field(default_factory=list)
    transcript: list[Any] = field(default_factory=list)
    free: int = 0
    failures: int = 0
    errors: list[str] = field(default_factory=list)
    """What kvplugin logged at ERROR."""
    restored: bool = True
    """Whether vLLM's names are its own again."""
