"""A request that cannot be served is refused when it comes, never later."""

from typing import Any

import pytest

from kvplugin.hashing import get_hash_format
from kvplugin.request import Request, RequestError
from kvplugin.scheduler import Scheduler, SchedulerConfig
from tests.core.manager_setups import Setup, full
from tests.scheduler.harness import Harness

FORMAT = get_hash_format()


def refused(match: str, request: Request, **how: Any) -> None:
    """By an engine that then serves others."""
    engine = Harness()
    with pytest.raises(RequestError, match=match):
        engine.scheduler.add_request(request, **({"max_tokens": 2} | how))
    assert engine.is_idle()
    engine.add("good", range(8), 2)
    engine.run()
    assert len(engine.outputs["good"]) == 2


@pytest.mark.parametrize("length", [1, 3, 4, 20])
@pytest.mark.parametrize(
    "hashed",
    [{}, {"hash_block_size": 4}]
    + [{"hash_format": FORMAT, "hash_block_size": n} for n in (1, 2, 8, 16)],
)
def test_hashes_are_those_of_the_managers_blocks(
    length: int, hashed: dict[str, Any]
) -> None:
    """Also of a prompt that is too short to have any yet."""
    refused("hash_block_size=4", Request("a", range(length), **hashed))


def test_hashes_do_not_matter_without_caching() -> None:
    manager = Setup((full(),), num_blocks=9).manager(enable_caching=False)
    scheduler = Scheduler(manager, SchedulerConfig())
    scheduler.add_request(Request("a", range(9)), 3)
    assert scheduler.schedule().num_scheduled_tokens == {"a": 9}


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("reset", [False, True])
def test_a_request_that_was_served_is_not_new(
    steps: int, depth: int, reset: bool
) -> None:
    engine = Harness(pipeline_depth=depth)
    request = engine.add("a", range(20), 9)
    for _ in range(steps):
        if len(engine.in_flight) == depth:
            engine.land()
        engine.schedule()
    if reset:
        engine.scheduler.reset_prefix_cache(reset_running=True)
    engine.scheduler.abort_request("a")
    with pytest.raises(RequestError, match="was served before: make a new Request"):
        engine.scheduler.add_request(request, 3)


@pytest.mark.parametrize(
    ("key", "value"),
    [("max_tokens", value) for value in (0, -1, 2.5, "3", None, True)]
    + [("num_encoder_tokens", value) for value in (-5, 1.5, None, "1")],
)
def test_counts_are_counts(key: str, value: Any) -> None:
    request = Request("a", range(4), hash_format=FORMAT, hash_block_size=4)
    refused(f"'a': {key}={value!r}", request, **{key: value})
