"""Oracle 9: an eviction policy that a pool would have to replace is an error.

In production a pool goes on with LRU when a policy raises or chooses the impossible
(`kvplugin.ranking`), so a run with a broken policy passes every other oracle.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import NoReturn
from unittest.mock import patch

from kvplugin.block_pool import BlockPool
from kvplugin.ranking import Ranking


class PolicyError(AssertionError):
    """A policy broke the protocol of `kvplugin.policies.eviction.EvictionPolicy`."""


@contextmanager
def strict_policies() -> Iterator[None]:
    """While it lasts, no pool replaces a policy: its fault is raised where it happens.

    Raises:
        PolicyError: with the policy's class, and from what was wrong with it.
    """
    with patch.object(Ranking, "_fall_back", _raise):
        yield


def watch_policy(pool: BlockPool) -> None:
    """The same for one pool, for as long as it lives."""
    ranking = pool._ranking
    ranking._fall_back = partial(_raise, ranking)  # type: ignore[method-assign]


def _raise(ranking: Ranking) -> NoReturn:
    error = sys.exception()
    raise PolicyError(
        f"eviction policy {type(ranking._policy).__name__} failed: "
        f"{type(error).__name__}: {error}"
    ) from error
