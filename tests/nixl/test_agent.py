"""The wrapper of NIXL's Python interface, and what a rank registers."""

import logging
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvplugin.connectors.nixl.agent import Area, Posted
from kvplugin.connectors.nixl.nixl_reader import (
    POST_BYTES,
    POST_PIECES,
    NixlRead,
    NixlReader,
    _cuts,
)
from kvplugin.connectors.nixl.rank_memory import merged
from kvplugin.connectors.nixl.reads import Transfer
from kvplugin.errors import ConfigError, IntegrityError, TransferError
from tests.nixl.ranks import Rank, RankSpec


class TestSetUp:
    def test_without_nixl(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "nixl", None)
        monkeypatch.setitem(sys.modules, "nixl._api", None)
        with pytest.raises(ConfigError, match=r"pip install 'kvplugin\[nixl\]'"):
            Rank(RankSpec("engine"))

    def test_it_is_not_needed_where_nothing_goes_over_a_network(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "nixl._api", None)
        rank = Rank(RankSpec("engine", config={"backends": []}))
        assert rank.worker._registered.rank.agent_metadata == b""
        rank.worker.close()

    def test_an_unknown_backend(self) -> None:
        pytest.importorskip("nixl")
        with pytest.raises(ConfigError, match="UCXX") as caught:
            Rank(RankSpec("engine", config={"backends": ["UCXX"]}))
        assert "backends" in str(caught.value)
        assert "Did you mean 'UCX'?" in str(caught.value)

    def test_nixls_own_thread_sleeps_while_there_is_nothing_to_do(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bindings = pytest.importorskip("nixl._api").nixlBind
        made: list[int] = []

        def agent(name: str, config: Any) -> Any:
            made.append(config.pthrDelay)
            return real(name, config)

        real = bindings.nixlAgent
        monkeypatch.setattr(bindings, "nixlAgent", agent)
        rank = Rank(RankSpec("engine"))
        assert made[-1] > 0
        assert rank.worker._memory is not None
        rank.worker.close()

    def test_a_nixl_that_is_not_as_expected_still_serves(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        bindings = pytest.importorskip("nixl._api").nixlBind
        real, asked = bindings.nixlAgentConfig, []

        def config() -> Any:
            asked.append(1)
            if len(asked) > 1:
                raise TypeError("another one")
            return real()

        monkeypatch.setattr(bindings, "nixlAgentConfig", config)
        with caplog.at_level(logging.WARNING, "vllm.kvplugin.nixl"):
            rank = Rank(RankSpec("engine"))
        assert rank.worker._registered.rank.agent_metadata
        rank.worker.close()
        assert "another one" in caplog.text

    def test_an_introduction_before_the_tensors(self) -> None:
        from kvplugin.connectors.nixl.config import NixlConfig
        from kvplugin.connectors.nixl.worker import NixlWorker

        worker = NixlWorker(RankSpec("engine").info(), NixlConfig())
        with pytest.raises(IntegrityError, match="registered"):
            worker.introduction()
        worker.close()


@pytest.mark.parametrize("seed", range(30))
def test_merged_areas_hold_the_same_bytes(seed: int) -> None:
    numbers = random.Random(seed)
    areas = [
        Area(numbers.randrange(200), numbers.randrange(1, 30), numbers.choice("cg"))
        for _ in range(numbers.randrange(12))
    ]

    def held(parts: "list[Area]") -> set[tuple[str, int]]:
        return {
            (area.device, area.address + i)
            for area in parts
            for i in range(area.nbytes)
        }

    found = merged(areas)
    assert held(found) == held(areas)
    assert len(held(found)) == sum(area.nbytes for area in found)
    for one in found:
        for other in found:
            apart = one.device != other.device or one is other
            assert apart or one.address + one.nbytes != other.address


@pytest.mark.parametrize("sizes", [[], [5], [POST_BYTES * 2, 7, 7], [16] * 5000])
def test_posts_are_bounded(sizes: list[int]) -> None:
    numbers = np.array(sizes, np.int64)
    transfer = Transfer(0, numbers, numbers, numbers, "cpu", "cpu")
    cuts = list(_cuts(transfer))
    assert [i for first, last in cuts for i in range(first, last)] == list(
        range(len(sizes))
    )
    for first, last in cuts:
        assert 0 < last - first <= POST_PIECES
        assert last - first == 1 or sum(sizes[first:last]) <= POST_BYTES


class Script:
    """Stands for a `NixlAgent` whose posts end as a test says: per post, the states
    that it goes through."""

    def __init__(self, *posts: list[str]) -> None:
        self._posts = list(posts)
        self.log: list[str] = []
        self.released: list[list[str]] = []

    def add_peer(self, metadata: bytes, name: str) -> None:
        self.log.append("add")

    def remove_peer(self, name: str) -> None:
        self.log.append("remove")

    def post(self, *args: object) -> Posted:
        states = self._posts.pop(0)
        self.log.append("post")
        if states[0] == "raise":
            raise TransferError("NIXL: no")
        return Posted(self, states, states.pop(0))  # type: ignore[arg-type]

    def state_of(self, handle: list[str]) -> str:
        return handle.pop(0)

    def release(self, handle: list[str]) -> None:
        self.released.append(handle)


def failure_of(read: NixlRead) -> str:
    """Polls until it has failed."""
    try:
        while not read.poll():
            pass
    except TransferError as error:
        return str(error)
    raise AssertionError("it has not failed")


class TestReads:
    @pytest.fixture
    def rank(self) -> Iterator[Rank]:
        rank = Rank(RankSpec("engine", num_blocks=8, config={"backends": []}))
        yield rank
        rank.worker.close()

    def read(self, rank: Rank, script: Script, pieces: int = 1) -> NixlRead:
        self.reader = NixlReader(script, rank.worker._registered.rank)  # type: ignore[arg-type]
        return self.reader.begin(self.transfer(pieces))

    def transfer(self, pieces: int) -> Transfer:
        sizes = np.full(pieces, POST_BYTES, np.int64)
        return Transfer(0, sizes, sizes, sizes, "cpu", "cpu")

    def test_a_handle_is_released_when_it_has_ended_and_not_before(
        self, rank: Rank
    ) -> None:
        script = Script(["PROC", "PROC", "PROC", "DONE"])
        read = self.read(rank, script)
        assert [read.poll() for _ in range(2)] == [False, False]
        read.stop()
        assert not script.released, "NIXL would go on writing"
        with pytest.raises(TransferError, match="stopped"):
            read.poll()
        assert len(script.released) == 1

    def test_nothing_more_is_posted_after_a_failure(self, rank: Rank) -> None:
        script = Script(
            ["PROC", "PROC", "REMOTE_DISCONNECT"], ["PROC", "PROC", "PROC", "DONE"]
        )
        read = self.read(rank, script, pieces=5)
        assert not read.poll()
        assert not read.poll()
        assert not read.is_prompt
        assert "REMOTE_DISCONNECT" in failure_of(read)
        assert script.log == ["add", "post", "post"]
        assert len(script.released) == 2

    def test_the_connection_is_made_anew_after_a_failure(self, rank: Rank) -> None:
        script = Script(["raise"], ["PROC", "gone"], ["DONE"])
        read = self.read(rank, script)
        with pytest.raises(TransferError, match="no"):
            read.poll()
        read = self.reader.begin(self.transfer(1))
        assert "gone" in failure_of(read)
        assert self.reader.begin(self.transfer(1)).poll()
        again = ["remove", "add", "post"]
        assert script.log == ["add", "post", *again, *again]

    def test_not_while_something_is_active(self, rank: Rank) -> None:
        """NIXL could never say how that ended."""
        script = Script(["PROC", "PROC", "PROC", "DONE"], ["raise"], ["DONE"], ["DONE"])
        slow = self.read(rank, script)
        assert not slow.poll()
        with pytest.raises(TransferError):
            self.reader.begin(self.transfer(1)).poll()
        assert self.reader.begin(self.transfer(1)).poll()
        assert "remove" not in script.log
        self.reader.close()
        assert "remove" not in script.log
        while not slow.poll():
            pass
        assert self.reader.begin(self.transfer(1)).poll()
        assert script.log[-3:] == ["remove", "add", "post"]
        self.reader.close()
        assert script.log[-1] == "remove"
