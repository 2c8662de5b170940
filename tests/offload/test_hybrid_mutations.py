"""The tests of offload would notice: rules broken on purpose are caught."""

from collections.abc import Callable
from functools import cache

import pytest

from kvplugin.errors import KVPluginError
from tests.offload.hybrid_mutations import MUTATIONS
from tests.scheduler.mutations import Mutation


@cache
def passes(watch: Callable[[], object]) -> bool:
    watch()
    return True


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_broken_rule_is_caught(
    mutation: Mutation, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert passes(mutation.watch)
    mutation.breaks(monkeypatch)
    with pytest.raises((AssertionError, KVPluginError)):
        mutation.watch()
