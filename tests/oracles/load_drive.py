"""What `load_runs` is asked and answers; free of vLLM: tests import it."""

from dataclasses import dataclass, field
from typing import Any

from tests.oracles.policy_drive import PolicyRun


@dataclass(frozen=True)
class Ask:
    """A request that a script brings."""

    name: str
    prompt: list[int]
    claimed: int = 0
    """Tokens of the prompt that the connector says it has."""
    fails_at: int | None = None
    """The first block of its load that fails, counted in the load; None: none."""
    is_async: bool = False
    answer: int = 4


@dataclass(frozen=True)
class LoadRun:
    """A scheduler with a connector whose loads fail."""

    run: PolicyRun
    failure_policy: str = "recompute"
    script: dict[int, list[Ask | str]] = field(default_factory=dict)
    """By step: requests that come before it, and names of requests that are aborted
    between it and its output. Empty: a random workload of the run's seed."""
    failures: float = 0.7
    """Share of random loads that fail."""
    asynchronous: float = 0.0
    """Share of random loads that are asynchronous."""
    pipelined: bool = False
    """Steps under way are those of a pipeline, not of asynchronous scheduling."""
    budget: int = 40
    """Tokens of a step."""
    chunk: int = 0
    """Tokens of a request in a step where there are several; 0: any number."""
    missing: str = ""
    """A method of vLLM's scheduler that this version has under another name."""


@dataclass
class LoadOutcome:
    """What a run came to."""

    kind: str = ""
    error: str = ""
    """What ended the engine."""
    wrong: list[str] = field(default_factory=list)
    """Requests with a token that a sound engine would not have said."""
    short: list[str] = field(default_factory=list)
    """Requests that ended early, though nobody aborted them."""
    failed: list[str] = field(default_factory=list)
    """Requests that ended with an error."""
    poisoned: int = 0
    """Blocks found in the prefix cache whose content is not what their hash says."""
    bad_loads: int = 0
    cached: dict[str, int] = field(default_factory=dict)
    """Tokens that hit when a request was last admitted."""
    claims: dict[str, int] = field(default_factory=dict)
    """How often the connector was asked for a request."""
    preempted: list[str] = field(default_factory=list)
    leaked: int = 0
    """Blocks that nobody holds and that are not free."""
    errors: list[str] = field(default_factory=list)
    counts: dict[str, Any] = field(default_factory=dict)
    """Cached tokens that vLLM reports of a request."""
