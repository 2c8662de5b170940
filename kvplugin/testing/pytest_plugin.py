"""Fixtures of the fault laboratory, for everybody who has kvplugin installed.

Nothing of kvplugin is imported when pytest loads this module, only when a test asks for
a fixture. Each fixture is a function or class of `kvplugin.testing`; see there.
"""

from collections.abc import Iterator
from typing import Any

import pytest


def _lab(name: str) -> Any:
    import kvplugin.testing

    return getattr(kvplugin.testing, name)


@pytest.fixture
def kv_lab() -> Any:
    """The class `Lab`: a scheduler with a toy model, a transport and all oracles."""
    return _lab("Lab")


@pytest.fixture
def kv_fake_transport() -> Any:
    """The class `FakeTransport`: jobs end exactly when a test says."""
    return _lab("FakeTransport")


@pytest.fixture
def kv_faulty_transport() -> Any:
    """The class `FaultyTransport`: jobs end by a script of fates."""
    return _lab("FaultyTransport")


@pytest.fixture
def kv_content_model() -> Any:
    """`watched_content(config, pool)`: the content model of a pool."""
    return _lab("watched_content")


@pytest.fixture
def kv_toy_model() -> Any:
    """The class `ToyModel`: executes scheduler outputs on a content model."""
    return _lab("ToyModel")


@pytest.fixture
def kv_explore_orders() -> Any:
    """`explore(make, actions, depth=...)`: every interleaving of named actions."""
    return _lab("explore")


@pytest.fixture
def kv_balance() -> Any:
    """Oracle 1, `assert_balanced`."""
    return _lab("assert_balanced")


@pytest.fixture
def kv_poison() -> Any:
    """Oracle 2, `assert_poisoned`."""
    return _lab("assert_poisoned")


@pytest.fixture
def kv_content() -> Any:
    """Oracle 3, `assert_cache_content`."""
    return _lab("assert_cache_content")


@pytest.fixture
def kv_equivalence() -> Any:
    """Oracle 4, `assert_equivalent`."""
    return _lab("assert_equivalent")


@pytest.fixture
def kv_progress() -> Any:
    """Oracle 5: a new `ProgressWatch`."""
    return _lab("ProgressWatch")()


@pytest.fixture
def kv_event_replay() -> Any:
    """Oracle 6: a new `EventReplay`."""
    return _lab("EventReplay")()


@pytest.fixture
def kv_estimator() -> Any:
    """Oracle 7, `assert_estimate`."""
    return _lab("assert_estimate")


@pytest.fixture
def kv_counters() -> Any:
    """Oracle 8: a new `CounterWatch`."""
    return _lab("CounterWatch")()


@pytest.fixture
def kv_strict_policies() -> Iterator[None]:
    """Oracle 9, `strict_policies`: in this test no pool replaces a policy by LRU."""
    with _lab("strict_policies")():
        yield
