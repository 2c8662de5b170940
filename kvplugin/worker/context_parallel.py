"""How a request's tokens are spread over context-parallel ranks."""

from dataclasses import dataclass

import torch

from kvplugin.errors import ConfigError
from kvplugin.spec import check_positive


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextParallel:
    """This worker's place among the ranks that share full attention's tokens.

    Raises:
        ConfigError: a size below 1, or a rank that does not exist.
    """

    ranks: int = 1
    """Decode times prefill context-parallel size."""
    rank: int = 0
    """Prefill rank times decode size, plus decode rank."""
    interleave: int = 1
    """Tokens of a piece; pieces go to the ranks in turn
    (``cp_kv_cache_interleave_size``)."""

    def __post_init__(self) -> None:
        check_positive(self, "ranks", "interleave")
        check_positive(self, "rank", least=0)
        if self.rank >= self.ranks:
            raise ConfigError(
                f"ContextParallel.rank {self.rank} must be below ranks {self.ranks}"
            )

    def local_lengths(self, lengths: torch.Tensor) -> torch.Tensor:
        """How many of the first `lengths` tokens of requests this rank keeps.

        Whole rounds give every rank a piece, and what is left goes out from rank 0
        (vLLM 0.19.1 `v1/attention/backends/utils.py`).
        """
        piece = self.interleave
        left = lengths % (self.ranks * piece) - self.rank * piece
        return lengths // (self.ranks * piece) * piece + left.clamp(0, piece)
