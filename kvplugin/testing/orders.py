"""Every order in which things can happen, up to a depth.

    Action("load done", lambda lab: lab.load_done(), lambda lab: lab.loading)
    ...
    report = explore(make_lab, actions, depth=7, check=Lab.check, finish=Lab.drain)
    assert report.orders == 1234

Deterministic: a system is made anew for each order and the same names give the same
run, so a failing order is a list of names that a test can replay.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

System = TypeVar("System")


def always(system: object) -> bool:
    """The guard of an action that is possible at any time."""
    del system
    return True


def nothing(system: object) -> None:
    """A check that finds no fault."""
    del system


@dataclass(frozen=True, slots=True)
class Action(Generic[System]):
    """Something that can happen."""

    name: str
    run: Callable[[System], object]
    enabled: Callable[[System], bool] = always
    """Whether it can happen now. Changes nothing."""


@dataclass(frozen=True, slots=True)
class Exploration:
    """What was tried."""

    orders: int
    """Orders run to their end: the depth, or no action left."""
    actions: int
    """Actions checked, each the last one of a distinct order."""
    pruned: int
    """Orders cut off because their state had been seen."""


class OrderError(AssertionError):
    """An order in which the system breaks.

    Attributes:
        order: names of the actions, as few as possible: leaving out any one of them
            makes the failure go away, or is not possible.
        found: names of the actions of the order in which it was first seen.
    """

    def __init__(self, order: list[str], found: list[str], cause: Exception) -> None:
        super().__init__(
            f"{type(cause).__name__} after {order} (found after {len(found)} actions): "
            f"{cause}"
        )
        self.order = order
        self.found = found


def explore(
    make: Callable[[], System],
    actions: Sequence[Action[System]],
    *,
    depth: int,
    check: Callable[[System], object] = nothing,
    finish: Callable[[System], object] = nothing,
    state: Callable[[System], Hashable] | None = None,
) -> Exploration:
    """Run every order of at most `depth` actions.

    Args:
        make: a new system; equal ones at every call.
        actions: names must differ.
        depth: actions of an order at most.
        check: called after each action; raises if an invariant is broken.
        finish: called at the end of each order, e.g. to drain and compare balances.
        state: what the future depends on. Given, an order whose state was seen with as
            many actions left is not followed again.

    Raises:
        OrderError: an action, `check` or `finish` raised; from that error.
        ValueError: two actions of one name.
    """
    if len({action.name for action in actions}) < len(actions):
        raise ValueError("two actions have the same name")
    search = _Search(make, actions, check, finish)
    orders = steps = pruned = 0
    seen: set[tuple[int, Hashable]] = set()
    todo: list[list[Action[System]]] = [[]]
    while todo:
        prefix = todo.pop()
        system = search.replay(prefix)
        if prefix:
            steps += 1
        while True:
            # Go on with this system for as long as it is the first alternative.
            left = depth - len(prefix)
            if state is not None:
                mark = (left, state(system))
                if mark in seen:
                    pruned += 1
                    break
                seen.add(mark)
            possible = [a for a in actions if left and a.enabled(system)]
            if not possible:
                orders += 1
                search.end(prefix, system)
                break
            todo += [[*prefix, action] for action in reversed(possible[1:])]
            prefix = [*prefix, possible[0]]
            search.act(prefix, system)
            steps += 1
    return Exploration(orders, steps, pruned)


def run_order(
    make: Callable[[], System],
    actions: Sequence[Action[System]],
    order: Sequence[str],
    *,
    check: Callable[[System], object] = nothing,
    finish: Callable[[System], object] = nothing,
) -> System:
    """Run one order by the names of its actions, guards ignored.

    Raises:
        KeyError: no action has that name.
    """
    by_name = {action.name: action for action in actions}
    system = make()
    for name in order:
        by_name[name].run(system)
        check(system)
    finish(system)
    return system


@dataclass(frozen=True, slots=True)
class _Search(Generic[System]):
    make: Callable[[], System]
    actions: Sequence[Action[System]]
    check: Callable[[System], object]
    finish: Callable[[System], object]

    def replay(self, prefix: list[Action[System]]) -> System:
        """A system after these actions, all but the last of which were checked."""
        system = self.make()
        for action in prefix[:-1]:
            action.run(system)
        if prefix:
            self.act(prefix, system)
        return system

    def act(self, prefix: list[Action[System]], system: System) -> None:
        """Run and check the last action."""
        try:
            prefix[-1].run(system)
            self.check(system)
        except Exception as error:
            raise self._minimal(prefix, error) from error

    def end(self, prefix: list[Action[System]], system: System) -> None:
        """The order is complete."""
        try:
            self.finish(system)
        except Exception as error:
            raise self._minimal(prefix, error) from error

    def _minimal(self, order: list[Action[System]], error: Exception) -> OrderError:
        """Leave out actions while the same kind of error is left."""
        found = [action.name for action in order]
        shrunk = True
        while shrunk:
            shrunk = False
            for i in range(len(order)):
                shorter = order[:i] + order[i + 1 :]
                again = self._fails(shorter)
                if type(again) is type(error):
                    order, error, shrunk = shorter, again, True
                    break
        return OrderError([action.name for action in order], found, error)

    def _fails(self, order: list[Action[System]]) -> Exception | None:
        """The error of an order; None if there is none or a guard forbids it."""
        system = self.make()
        try:
            for action in order:
                if not action.enabled(system):
                    return None
                action.run(system)
                self.check(system)
            self.finish(system)
        except Exception as error:
            return error
        return None
