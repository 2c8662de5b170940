"""The soak notices what it is for; a short one runs through."""

from pathlib import Path

import pytest

from tests.engine.asking import Answer
from tests.soak.engines import soak
from tests.soak.load import difference
from tests.soak.outcome import GROWTH_MIB, SETTLED_S, Outcome


def answer(*places: tuple[int, float, float]) -> Answer:
    """Of tokens with their log-probability and that of token 0, the next best."""
    return Answer(
        tokens=tuple(token for token, _, _ in places),
        candidates=tuple({token: best, 0: second} for token, best, second in places),
        cached_tokens=0,
        finish_reason="length",
    )


RIGHT = answer((5, -0.1, -3.0), (6, -0.2, -0.2001), (7, -0.3, -4.0))


@pytest.mark.parametrize(
    ("found", "word"),
    [
        (answer((5, -0.1, -3.0)), ""),
        (answer((5, -0.1, -3.0), (6, -0.2004, -0.2)), ""),
        (answer((5, -0.1, -3.0), (8, -0.2, -0.2), (9, -1.0, -2.0)), ""),  # a tie
        (answer((5, -0.2, -3.0)), "log-probability"),
        (answer((6, -0.1, -3.0)), "token 0"),
    ],
)
def test_answers_are_compared_up_to_ties(found: Answer, word: str) -> None:
    difference_found = difference(found, RIGHT)
    assert bool(difference_found) == bool(word)
    assert word in difference_found


def outcome(**changes: object) -> Outcome:
    memory = [(float(i), 500.0) for i in range(64)]
    fine: dict[str, object] = {
        "seconds": SETTLED_S,
        "requests": 3,
        "answered": 2,
        "aborted": 1,
        "memory": memory,
        "faults": {"torn": 2},
        "metrics": {"loaded_bytes": 4096.0},
        "damage_seen": 1,
    }
    return Outcome(**(fine | changes))  # type: ignore[arg-type]


def test_a_run_in_which_all_is_well_is_not_complained_about() -> None:
    assert not outcome().complaints()
    assert "500, 500" in outcome().table()


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"wrong": ["soak-1: token 0 is 4, not 5"]}, "wrong answers"),
        ({"held": {"host slots": 2}}, "2 host slots"),
        ({"threads": ["kvplugin-offload-1"]}, "kvplugin-offload-1"),
        ({"answered": 1}, "without an end"),
        ({"metrics": {}}, "nothing was loaded"),
        ({"faults": {}}, "no copy went wrong"),
        ({"damage_seen": 0}, "damaged host memory"),
        (
            {"memory": [(i, 500.0 + GROWTH_MIB / 20 * i) for i in range(64)]},
            "memory grew",
        ),
    ],
)
def test_what_is_not_well_is_named(changes: dict[str, object], word: str) -> None:
    assert word in " ".join(outcome(**changes).complaints())


@pytest.mark.full
@pytest.mark.engine
def test_a_short_soak(tmp_path: Path) -> None:
    """Of everything some happens, and the comparison sees damaged host memory."""
    found = soak(tmp_path, 15.0, 1, documents=3, questions=4, damage=True)
    assert not found.complaints(), found.table()
    assert found.answered
    assert found.cached_tokens
    assert found.damage_seen
