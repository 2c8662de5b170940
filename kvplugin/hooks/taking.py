"""How an answer is taken: once, as plain data, so that what is checked is what is used.

An answer of another kind is returned as it is, for the check to refuse.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import index
from typing import Any


def as_it_is(answer: Any) -> Any:
    """Of a kind that cannot change."""
    return answer


def id_(answer: Any) -> Any:
    """A request id, without what a subclass of str makes of it."""
    return str.__str__(answer) if isinstance(answer, str) else answer


def ids(answer: Any) -> Any:
    """A sequence of request ids."""
    is_sequence = isinstance(answer, Sequence) and not isinstance(answer, str)
    return [id_(one) for one in answer] if is_sequence else answer


def boundaries(answer: Any) -> Any:
    """A collection of token counts.

    Raises:
        TypeError: one of them is no integer.
    """
    is_collection = isinstance(answer, Collection) and not isinstance(answer, str)
    return [index(one) for one in answer] if is_collection else answer
