"""The order driver counts right, finds a planted bug, and reports it minimally."""

from math import factorial

import pytest

from kvplugin.testing import Action, OrderError, explore, run_order


class Account:
    """Takes money out in two halves; the planted bug: the check is in the first."""

    def __init__(self, *, safe: bool) -> None:
        self.balance, self.safe = 1, safe
        self.pending: set[str] = set()
        self.log: list[str] = []

    def begin(self, who: str) -> None:
        self.log.append(f"begin {who}")
        if self.balance > 0:
            self.pending.add(who)

    def end(self, who: str) -> None:
        self.log.append(f"end {who}")
        self.pending.remove(who)
        if self.balance > 0 or not self.safe:
            self.balance -= 1

    def look(self) -> None:
        self.log.append("look")

    def check(self) -> None:
        assert self.balance >= 0, "overdrawn"


def actions() -> list[Action[Account]]:
    found = [Action("look", Account.look, lambda a: a.log.count("look") < 1)]
    for who in "ab":
        found += [
            Action(
                f"begin {who}",
                lambda a, who=who: a.begin(who),
                lambda a, who=who: f"begin {who}" not in a.log,
            ),
            Action(
                f"end {who}",
                lambda a, who=who: a.end(who),
                lambda a, who=who: who in a.pending,
            ),
        ]
    return found


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_counts_of_independent_actions(n: int) -> None:
    """n things that happen once each: n! orders, one check for each beginning."""
    once = [
        Action(str(i), lambda s, i=i: s.append(i), lambda s, i=i: i not in s)
        for i in range(n)
    ]
    ends: list[tuple[int, ...]] = []
    found = explore(list[int], once, depth=n, finish=lambda s: ends.append(tuple(s)))
    beginnings = sum(factorial(n) // factorial(n - k) for k in range(1, n + 1))
    assert (found.orders, found.actions, found.pruned) == (factorial(n), beginnings, 0)
    assert len(set(ends)) == factorial(n)
    assert ends == sorted(ends)


def test_the_depth_ends_orders() -> None:
    free = [Action(name, lambda s: None) for name in "abc"]
    assert explore(object, free, depth=4).orders == 3**4


def test_equal_states_are_followed_once() -> None:
    steps = [
        Action("up", lambda s: s.append(1)),
        Action("down", lambda s: s.append(-1)),
    ]
    found = explore(list[int], steps, depth=6, state=sum)
    assert found.orders == 7
    assert found.pruned


def test_a_planted_bug_is_found_and_reported_minimally() -> None:
    with pytest.raises(OrderError, match="overdrawn") as caught:
        explore(lambda: Account(safe=False), actions(), depth=5, check=Account.check)
    error = caught.value
    assert "look" in error.found
    assert sorted(error.order) == ["begin a", "begin b", "end a", "end b"]
    assert max(map(error.order.index, ("begin a", "begin b"))) == 1
    assert isinstance(error.__cause__, AssertionError)
    with pytest.raises(AssertionError, match="overdrawn"):
        run_order(
            lambda: Account(safe=False), actions(), error.order, check=Account.check
        )


def test_without_the_bug_every_order_passes() -> None:
    make = lambda: Account(safe=True)  # noqa: E731
    found = explore(make, actions(), depth=5, check=Account.check)
    assert found == explore(make, actions(), depth=5, check=Account.check)
    assert found.orders > 20


def test_what_fails_at_the_end_only() -> None:
    def empty(system: list[int]) -> None:
        assert not system, "not drained"

    grow = [Action("grow", lambda s: s.append(1)), Action("rest", lambda s: None)]
    with pytest.raises(OrderError, match="not drained") as caught:
        explore(list[int], grow, depth=3, finish=empty)
    assert caught.value.order == ["grow"]


def test_names_must_differ() -> None:
    twins = [Action("a", lambda s: None), Action("a", lambda s: None)]
    with pytest.raises(ValueError, match="same name"):
        explore(object, twins, depth=1)
