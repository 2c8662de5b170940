"""A network that fails between two engines: every answer is right and in time, every
block comes back, and reads go on afterwards."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nixl.network_lab import TIMES, Net, World, world_in

pytest.importorskip("nixl")
pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    try:
        net = Net()
    except OSError as error:
        pytest.skip(str(error))
    try:
        with world_in(net, Path(tmp_path_factory.mktemp("gates"))) as world:
            yield world
    finally:
        net.close()


def test_down_before_the_question(world: World) -> None:
    prompt, params = world.prefill()
    world.net.link("down")
    try:
        world.ends_right(world.decode(prompt, params), prompt)
    finally:
        world.net.link("up")
    world.is_empty()
    world.recovers()


def test_down_after_the_grant(world: World) -> None:
    id_, prompt = world.held()
    world.net.link("down")
    try:
        world.let_go()
        world.ends_right(id_, prompt)
        assert world.used(world.d), "blocks were given back below a read"
    finally:
        world.net.link("up")
    world.is_empty()
    world.recovers()


def test_down_in_the_middle_of_a_read(world: World) -> None:
    given_up = world.count("given_up_reads")
    id_, prompt = world.half_read()
    world.net.link("down")
    try:
        world.go_on()
        world.ends_right(id_, prompt)
        assert world.count("given_up_reads") == given_up + 1
        assert world.used(world.d), "blocks were given back below a read"
    finally:
        world.net.link("up")
    world.is_empty()
    world.recovers()


def test_down_for_a_moment_in_the_middle_of_a_read(world: World) -> None:
    id_, prompt = world.half_read()
    world.net.link("down")
    world.go_on()
    time.sleep(0.5)
    world.net.link("up")
    world.ends_right(id_, prompt)
    world.is_empty()
    world.recovers()


def test_down_after_a_read(world: World) -> None:
    """The farewell may be lost: the lease runs out."""
    prompt, params = world.prefill()
    world.ends_right(world.decode(prompt, params), prompt)
    world.net.link("down", world.net.d)
    time.sleep(TIMES["kv_lease_duration"])
    world.net.link("up", world.net.d)
    world.is_empty()
    world.recovers()


def test_packets_become_smaller(world: World) -> None:
    for end in world.net.ends:
        world.net.mtu(600, end)
        world.is_served()


def test_an_address_goes_in_the_middle_of_a_read_and_comes_back(world: World) -> None:
    """Without its return NIXL would end the read when TCP gives up, after some 15
    minutes."""
    net, end = world.net, world.net.p
    id_, prompt = world.half_read()
    net.address("del", end, net.ends[end])
    net.address("add", end, "10.213.7.9")
    try:
        world.go_on()
        world.ends_right(id_, prompt)
    finally:
        net.address("add", end, net.ends[end])
    world.is_empty()
    world.recovers()
