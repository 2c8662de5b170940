"""The tests of the scheduler would notice: rules broken on purpose are caught."""

from collections.abc import Callable
from functools import cache

import pytest

from kvplugin.errors import KVPluginError
from tests.scheduler.mutations import MUTATIONS, Mutation
from tests.scheduler.rule_mutations import RULE_MUTATIONS


@cache
def passes(watch: Callable[[], object]) -> bool:
    watch()
    return True


@pytest.mark.parametrize(
    "mutation", [*MUTATIONS, *RULE_MUTATIONS], ids=lambda mutation: mutation.name
)
def test_a_broken_rule_is_caught(
    mutation: Mutation, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert passes(mutation.watch)
    mutation.breaks(monkeypatch)
    with pytest.raises((AssertionError, KVPluginError)):
        mutation.watch()
