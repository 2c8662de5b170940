"""Histories: what a layer keeps of the tokens that it has seen, wherever that lies.

A layer hands the new rows of a step to its history and asks for what the queries may
see. `dense.py` keeps it in plain tensors, `paged.py` in KV blocks; a layer cannot tell
them apart, so an engine and its reference differ in nothing else.

All requests of a step are appended before any is read: one may hit blocks that another
writes in this very step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

Tensors: TypeAlias = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """The new tokens of one request among the rows of a step."""

    start: int
    """First row."""
    stop: int
    """Row behind the last."""
    num_computed: int
    """Tokens before the step."""
    num_prompt: int
    """Tokens of the prompt, which encoder-only layers see both ways."""
    encoder: torch.Tensor | None = None
    """Rows [tokens, hidden] of its encoder input, for cross-attention."""

    @property
    def rows(self) -> slice:
        """Its rows."""
        return slice(self.start, self.stop)

    @property
    def end(self) -> int:
        """Tokens after the step, drafts included."""
        return self.num_computed + self.stop - self.start


class TokenHistory(Protocol):
    """Rows of tokens: keys and values, or latents and their rotary parts."""

    def append(self, *rows: torch.Tensor) -> None:
        """Keep the new rows of all requests, [tokens, ...] each."""

    def read(self, index: int, first: int) -> Tensors:
        """The rows of a request from token `first` to its last one.

        Args:
            index: of the request in the step.
            first: the first token that a query may see.
        """

    def read_sink(self) -> Tensors:
        """The rows that all requests share."""


class StateHistory(Protocol):
    """Recurrent states, each one or more tensors."""

    def load(self, index: int) -> Tensors | None:
        """The state before the first new token of a request; None for the initial
        one."""

    def keep(self, index: int, num_tokens: int, state: Tensors) -> None:
        """Offer the state after `num_tokens` tokens of a request; `state` may change
        afterwards."""


History: TypeAlias = TokenHistory | StateHistory
Spans: TypeAlias = Sequence[Span]
