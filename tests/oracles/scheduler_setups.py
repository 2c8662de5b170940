"""What `scheduler_runs` runs."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Run:
    """Groups are described as in `vllm_core`."""

    groups: list[tuple[str, dict[str, Any]]]
    num_blocks: int
    seed: int
    block_size: int = 4
    max_model_len: int = 128
    budget: int = 48
    steps: int = 80
    policy: str = "fcfs"
    drafts: int = 0
    enable_caching: bool = True
    reserve_full_isl: bool = True
