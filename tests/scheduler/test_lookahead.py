"""Slots for a draft model behind the settled tokens: whatever is drafted, outputs are
those of a plain run, and what is accepted at submit completes."""

from collections.abc import Callable

import pytest

from kvplugin.request import RequestError
from kvplugin.spec import KVCacheSpec
from tests.core.manager_setups import full, mamba, window
from tests.testing.lab import Lab

Specs = tuple[KVCacheSpec, ...]

GROUPS: dict[str, Callable[[int], Specs]] = {
    "full": lambda _: (full(),),
    "full+window": lambda _: (full(), window(6)),
    "full+aligned states": lambda drafts: (full(), mamba("align", drafts=drafts)),
}
STEPS = [(lookahead, drafts) for lookahead in (0, 1, 4) for drafts in (0, 1, 4)]


@pytest.mark.parametrize(("lookahead", "drafts"), STEPS)
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_outputs_are_those_of_a_plain_run(
    groups: Callable[[int], Specs], lookahead: int, drafts: int
) -> None:
    """In a pool of one and a half requests, with drafts that the model accepts or not
    (`drain` compares)."""
    lab = Lab(groups(drafts), 26 + 3 * drafts, lookahead=lookahead, drafts=drafts)
    for i in range(5):
        lab.add([*range(4 * i), *range(50 + i, 60)], 5 + 2 * i)
    lab.drain()
    assert [len(tokens) for tokens in lab.outputs.values()] == [5, 7, 9, 11, 13]


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize(("lookahead", "drafts"), STEPS)
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_a_request_that_fills_the_pool_completes_or_is_refused(
    groups: Callable[[int], Specs], lookahead: int, drafts: int, caching: bool
) -> None:
    """Alone in pools around its size, in one step or in chunks."""
    served = refused = 0
    for usable in range(4, 26):
        for length, n in ((7, 1), (8, 5), (33, 3), (40, 8)):
            lab = Lab(
                groups(drafts),
                usable,
                lookahead=lookahead,
                drafts=drafts,
                caching=caching,
            )
            try:
                lab.add(list(range(length)), n)
            except RequestError:
                refused += 1
                continue
            lab.drain()
            assert len(lab.outputs["r0"]) == n
            served += 1
    assert served > 5
    assert refused > 5
