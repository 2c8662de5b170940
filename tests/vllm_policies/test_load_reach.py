"""What a failed load reaches, by itself."""

from types import SimpleNamespace
from typing import Any

from kvplugin.integration.vllm.load_reach import Row, admitted_rows, reached


def step(new: dict[str, Any], grown: dict[str, Any], resumed: set[str]) -> Any:
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, block_ids=groups)
            for name, groups in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(grown),
            new_block_ids=list(grown.values()),
            resumed_req_ids=resumed,
        ),
    )


def test_rows_grow_from_step_to_step_and_begin_again() -> None:
    first, again = admitted_rows(
        [
            step({"a": ([1, 2],)}, {"older": ([9],)}, set()),
            step({}, {"a": ([3],), "older": None}, set()),
            step({}, {"a": ([7, 8],)}, {"a"}),
            step({}, {"a": ([5],)}, set()),
        ]
    )
    assert first == Row("a", [[1, 2, 3]])
    assert again == Row("a", [[7, 8, 5]])


def test_what_follows_a_bad_block_is_bad_and_what_precedes_is_not() -> None:
    rows = [Row("a", [[1, 2, 3]]), Row("b", [[1, 4]]), Row("c", [[1, 2, 5]])]
    found = reached({2}, rows, [4], 0)
    assert found.blocks == {2, 3, 5}
    assert found.requests == {"a": 4, "c": 4}


def test_it_goes_through_blocks_that_a_window_dropped() -> None:
    rows = [Row("later", [[0, 0, 3, 6]]), Row("owner", [[1, 2, 3]])]
    found = reached({1}, rows, [4], 0)
    assert found.blocks == {1, 2, 3, 6}
    assert found.requests == {"later": 8, "owner": 0}


def test_groups_are_undone_from_the_same_token() -> None:
    rows = [Row("a", [[1, 2, 3, 4], [0, 5]])]
    found = reached({3}, rows, [4, 8], 0)
    assert found.blocks == {3, 4, 5}
    assert found.requests == {"a": 8}


def test_the_null_block_is_never_bad() -> None:
    found = reached({0}, [Row("a", [[0, 1]])], [4], 0)
    assert (found.blocks, found.requests) == (set(), {})
