"""A rank in a process of its own, told what to do over a pipe."""

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from typing import Any

from tests.nixl.ranks import Rank, RankSpec, peer_of

ANSWER_SECONDS = 400.0


_PARTS = ["tests.nixl.peer_process", "nixl._api"]
"""What takes seconds to import: done once, in a process of which peers are copies."""


def _serve(spec: RankSpec, pipe: Connection, environment: dict[str, str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(environment)
    rank = Rank(spec)
    pipe.send(rank.introduction())
    while (step := pipe.recv()) is not None:
        rank.step(**step)
        pipe.send(rank.worker.poll())
    rank.worker.close()
    pipe.send(None)


class PeerProcess:
    """A producer's rank that can be stopped and killed.

    Args:
        spec: what it is.
    """

    def __init__(self, spec: RankSpec) -> None:
        self.spec = spec
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PARTS)
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(spec, theirs, dict(os.environ)), daemon=True
        )
        self._process.start()
        theirs.close()
        self.introduction: bytes = self._answer()
        self.peer = peer_of(spec, [self.introduction]) if spec.tp_size == 1 else None
        self.memory = spec.memory()
        """What it holds, computed here."""

    def _answer(self) -> Any:
        assert self._pipe.poll(ANSWER_SECONDS), "the peer does not answer"
        return self._pipe.recv()

    def step(self, **what: Any) -> Any:
        """A step there; its outcome."""
        self._pipe.send(what)
        return self._answer()

    @property
    def pid(self) -> int:
        """Of its process."""
        assert self._process.pid is not None
        return self._process.pid

    def pause(self) -> None:
        """It does nothing more until `resume`."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """It goes on."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """It dies without a word."""
        self._process.kill()
        self._process.join(ANSWER_SECONDS)

    def close(self) -> None:
        """It ends as it should, if it lives."""
        if self._process.is_alive():
            self._pipe.send(None)
            self._answer()
            self._process.join(ANSWER_SECONDS)
        self._pipe.close()
