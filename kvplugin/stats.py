"""Counts of prefix-cache lookups between two readings."""

from dataclasses import dataclass


@dataclass
class PrefixCacheStats:
    """Fields and meaning of vLLM 0.19.1's class of this name. Token counts."""

    reset: bool = False
    """The cache was reset since the last reading."""
    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0

    def record(self, num_tokens: int, num_hits: int, preempted: bool) -> None:
        """Count one lookup; those of preempted requests apart, since a request that
        finds its own blocks again says nothing about sharing."""
        if preempted:
            self.preempted_requests += 1
            self.preempted_queries += num_tokens
            self.preempted_hits += num_hits
        else:
            self.requests += 1
            self.queries += num_tokens
            self.hits += num_hits
