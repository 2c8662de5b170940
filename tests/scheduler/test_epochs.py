"""New weights: nobody uses what was computed with the old ones."""

from itertools import product
from typing import Any

import pytest

from kvplugin.errors import ConfigError
from kvplugin.hashing import get_hash_format
from tests.scheduler.harness import Harness, loaded


@pytest.mark.parametrize("blocked", [False, True])
@pytest.mark.parametrize("epoch_of_request", [0, 1, 2, 7])
def test_newcomers_are_of_the_epoch(blocked: bool, epoch_of_request: int) -> None:
    """Whatever they were made for, and whether the old blocks could be forgotten."""
    engine = Harness(connects=True)
    engine.add("old", range(16))
    engine.run()
    if blocked:
        engine.add("l", range(100, 120))
        engine.connector.offers["l"] = 16
        engine.step()
    assert engine.scheduler.reset_prefix_cache(weight_epoch=2) != blocked
    new = engine.add("new", range(16), weight_epoch=epoch_of_request)
    assert new.weight_epoch == 2
    outputs = [engine.step() for _ in range(3)]
    (data,) = [n for o in outputs for n in o.scheduled_new_reqs if n.req_id == "new"]
    assert data.num_computed_tokens == 0
    engine.step(loaded("l"))
    engine.run()
    assert engine.is_idle()


WRONG: list[Any] = [1, 0, -1, 1.5, 2.5, "x", "3", True, 2**63, 10**30]


@pytest.mark.parametrize("epoch", WRONG)
def test_an_epoch_is_an_integer_above_the_last_one(epoch: Any) -> None:
    engine = Harness(connects=True)
    engine.scheduler.reset_prefix_cache(weight_epoch=1)
    refused(engine, "must be an integer, at least 2", epoch)


@pytest.mark.parametrize("position", range(3))
def test_a_format_without_epochs_is_refused(position: int) -> None:
    engine = Harness(connects=True)
    own, theirs = engine.formats, get_hash_format("vllm019_sha256_cbor", seed="0")
    for i in range(3):
        engine.formats = theirs if i == position else own
        engine.add(f"r{i}", range(100 * i, 100 * i + 8), 5)
    refused(engine, "knows no epochs", 1)


def refused(engine: Harness, match: str, epoch: Any) -> None:
    """Nothing has changed."""
    engine.add("a", range(200, 208), 5)
    engine.step()
    resets, before = engine.connector.resets, engine.scheduler.state()
    requests = [entry.request for entry in engine.scheduler.requests.values()]
    hashes = [(r.weight_epoch, list(r.block_hashes)) for r in requests]
    with pytest.raises(ConfigError, match=match):
        engine.scheduler.reset_prefix_cache(weight_epoch=epoch)
    assert (engine.connector.resets, engine.scheduler.state()) == (resets, before)
    assert [(r.weight_epoch, list(r.block_hashes)) for r in requests] == hashes
    engine.run()


def test_a_newcomer_without_epochs_is_refused_after_a_change() -> None:
    engine = Harness()
    engine.scheduler.reset_prefix_cache(weight_epoch=1)
    engine.formats = get_hash_format("vllm019_sha256_cbor", seed="0")
    with pytest.raises(ConfigError, match="knows no epochs"):
        engine.add("a", range(8))
    assert engine.is_idle()


@pytest.mark.parametrize(("local", "remote"), product([False, True], repeat=2))
@pytest.mark.parametrize("epoch", [None, 1])
def test_both_caches_are_reset_and_both_must_agree(
    local: bool, remote: bool, epoch: int | None
) -> None:
    engine = Harness(connects=True)
    engine.connector.resets_well = remote
    if not local:
        engine.connector.keeps.add("a")
        engine.add("a", range(8))
        engine.step()
    done = engine.scheduler.reset_prefix_cache(weight_epoch=epoch)
    assert done == (local and remote)
    assert engine.connector.resets == 1
