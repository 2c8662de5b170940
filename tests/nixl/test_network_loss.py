"""Packets that are lost between two engines: every answer is right and in time, every
block comes back, and reads go on afterwards."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nixl.lossy_net import LossyNet
from tests.nixl.network_lab import World, world_in

pytest.importorskip("nixl")
pytestmark = pytest.mark.full
REQUESTS = 6


@pytest.fixture(scope="module")
def net() -> Iterator[LossyNet]:
    try:
        net = LossyNet()
    except OSError as error:
        pytest.skip(str(error))
    yield net
    net.close()


@pytest.fixture(scope="module")
def world(net: LossyNet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world_in(net, Path(tmp_path_factory.mktemp("gates"))) as world:
        yield world


@pytest.mark.parametrize("loss", [0.01, 0.05, 0.2, 0.5])
def test_some_packets_are_lost(net: LossyNet, world: World, loss: float) -> None:
    """TCP sends them again: a little late it is read, much too late computed."""
    read, lost = world.count("reads"), net.lost
    net.loss = loss
    try:
        for _ in range(REQUESTS):
            prompt, params = world.prefill()
            world.ends_right(world.decode(prompt, params), prompt)
    finally:
        net.loss = 0.0
    world.is_empty()
    world.recovers()
    assert net.lost > lost or loss < 0.05
    assert world.count("reads") > read + 1 or loss > 0.05
