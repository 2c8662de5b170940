"""An engine in a process of its own, behind a pipe.

    def make(seed: int) -> ReferenceEngine:
        return ReferenceEngine(random_model(MODEL, seed), EngineConfig())

    if __name__ == "__main__":
        with EngineProcess(make, 7) as engine:
            (answer,) = engine.generate([[1, 2, 3]])

The process is spawned, so it imports the module of `make`: what starts it must stand
behind the guard, as above, and `make` and its arguments must be picklable. One order at
a time is answered by one reply (`orders.py`). Two engines work at once if both are
given an order by `send` before either is asked to `receive`.

Nothing waits for ever: a reply that does not come in time ends the process, since the
next one would be to an order that nobody waits for. The process ends when its parent
does, whatever either is doing.
"""

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, Final, Self, TypeVar

import torch

from kvplugin.errors import IntegrityError, KVPluginError
from kvplugin.integration.reference.config import SamplingParams
from kvplugin.integration.reference.engine import ReferenceEngine
from kvplugin.integration.reference.orders import (
    ERRORS,
    Abort,
    Add,
    Added,
    AskStats,
    Close,
    Done,
    Drain,
    EngineStats,
    Failed,
    Finish,
    Generate,
    News,
    Order,
    OrderMessage,
    Reply,
    ReplyMessage,
    Reset,
    ResetDone,
    Served,
    ServedAll,
    Step,
    failure,
)
from kvplugin.wire import decode, encode

START_SECONDS: Final = 120.0
"""How long an engine may take to start: it imports torch, maybe on a busy machine."""
REPLY_SECONDS: Final = 60.0
"""How long an order may take."""
END_SECONDS: Final = 5.0
"""How long a process may take to end when it is told to."""

_START: Final = "the start"

R = TypeVar("R", Done, Added, News, ServedAll, ResetDone, EngineStats)


class EngineProcessError(KVPluginError):
    """The process is gone, did not answer in time, or failed in a way that is no error
    of kvplugin's; the message says which, with the trace of the process."""


class EngineProcess:
    """Starts a process; `ready` waits for it, as the first order does.

    Args:
        make: builds the engine, in the process; a function of a module.
        args: of `make`.
        threads: that torch computes with.
        reply_seconds: how long an order may take.
        start_seconds: how long the start may take.
    """

    def __init__(
        self,
        make: Callable[..., ReferenceEngine],
        *args: Any,
        threads: int = 1,
        reply_seconds: float = REPLY_SECONDS,
        start_seconds: float = START_SECONDS,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, make, args, threads), daemon=True
        )
        self._process.start()
        theirs.close()  # the process has it alone, so its end is the pipe's
        self._reply_seconds = reply_seconds
        self._start_seconds = start_seconds
        self._awaited: str | None = _START
        """What the next reply is to."""

    @property
    def pid(self) -> int | None:
        """Of the process."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.is_alive()

    # -- orders --------------------------------------------------------------------

    def ready(self) -> None:
        """Wait until the engine stands.

        Raises:
            KVPluginError: what `make` raised.
            EngineProcessError: it raised something else, or took too long.
        """
        if self._awaited == _START:
            self._hear(Done, self._start_seconds)

    def send(self, order: Order) -> None:
        """Give an order; its reply is to be received before the next one.

        Raises:
            EngineProcessError: the process is gone.
            IntegrityError: the reply to another order has not been received.
        """
        self.ready()
        if self._awaited is not None:
            raise IntegrityError(f"receive the reply to {self._awaited} first")
        name = type(order).__name__
        with self._deadline(name, self._reply_seconds):
            self._pipe.send_bytes(encode(OrderMessage(order)))
        self._awaited = name

    def receive(self, kind: type[R], timeout: float | None = None) -> R:
        """The reply to the order that was sent.

        Args:
            kind: of the reply.
            timeout: seconds; None for `reply_seconds`.

        Raises:
            KVPluginError: what the engine raised.
            EngineProcessError: it raised something else, is gone, or took too long.
        """
        return self._hear(kind, self._reply_seconds if timeout is None else timeout)

    def add_request(
        self,
        prompt: Sequence[int],
        params: SamplingParams = SamplingParams(),  # noqa: B008
        *,
        req_id: str | None = None,
        encoder_token_ids: Sequence[int] = (),
        cache_salt: str | None = None,
        priority: int = 0,
        kv_transfer_params: Mapping[str, Any] | None = None,
    ) -> str:
        """See `ReferenceEngine.add_request`."""
        order = Add(
            list(prompt),
            params,
            req_id,
            list(encoder_token_ids),
            cache_salt,
            priority,
            None if kv_transfer_params is None else dict(kv_transfer_params),
        )
        return self._ask(order, Added).req_id

    def step(self, count: int = 1) -> News:
        """At most so many steps, and what came of them."""
        return self._ask(Step(count), News)

    def drain(self) -> News:
        """Steps until nothing is left to do."""
        return self._ask(Drain(), News)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams = SamplingParams(),  # noqa: B008
    ) -> list[Served]:
        """See `ReferenceEngine.generate`; logits stay in the process."""
        return self._ask(Generate(list(map(list, prompts)), params), ServedAll).answers

    def finish(self, req_ids: Sequence[str]) -> list[Served]:
        """Steps until these requests have ended, and their answers."""
        return self._ask(Finish(list(req_ids)), ServedAll).answers

    def abort(self, req_id: str) -> None:
        """See `ReferenceEngine.abort`."""
        self._ask(Abort(req_id), Done)

    def reset_prefix_cache(self, *, local_only: bool = False) -> bool:
        """See `ReferenceEngine.reset_prefix_cache`."""
        return self._ask(Reset(local_only), ResetDone).is_done

    def stats(self) -> EngineStats:
        """What the engine holds, and what its connector has counted since the last
        question."""
        return self._ask(AskStats(), EngineStats)

    def close(self) -> None:
        """End the process; once it is over, nothing happens.

        Raises:
            KVPluginError: the engine cannot be closed; the process ends nevertheless.
        """
        try:
            if self.is_alive and self._awaited is None:
                self._ask(Close(), Done)
                self._process.join(END_SECONDS)
        finally:
            self._kill()

    def __enter__(self) -> Self:
        """The engine, when it stands."""
        try:
            self.ready()
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    # -- the pipe ------------------------------------------------------------------

    def _ask(self, order: Order, kind: type[R]) -> R:
        self.send(order)
        return self.receive(kind)

    def _hear(self, kind: type[R], seconds: float) -> R:
        what, self._awaited = self._awaited, None
        if what is None:
            raise IntegrityError("no order is under way")
        with self._deadline(what, seconds):
            data = self._pipe.recv_bytes()
        reply = decode(data, ReplyMessage).reply
        if isinstance(reply, Failed):
            if what == _START:
                self._kill()
            if reply.kind in ERRORS:
                raise ERRORS[reply.kind](reply.message)
            raise EngineProcessError(f"{reply.kind}: {reply.message}\n{reply.trace}")
        if not isinstance(reply, kind):
            raise IntegrityError(f"the reply to {what} is {reply}, not a {kind}")
        return reply

    @contextmanager
    def _deadline(self, what: str, seconds: float) -> Iterator[None]:
        """Killing the process ends whatever waits for it."""
        late = threading.Event()

        def end() -> None:
            late.set()
            self._process.kill()

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        try:
            yield
        except (EOFError, OSError) as error:
            self._kill()
            why = (
                f"no reply to {what} within {seconds} s"
                if late.is_set()
                else (
                    f"it ended during {what}, with exit code {self._process.exitcode}"
                )
            )
            raise EngineProcessError(f"engine process {self.pid}: {why}") from error
        except BaseException:
            self._kill()  # the reply would be taken for that to the next order
            raise
        finally:
            timer.cancel()

    def _kill(self) -> None:
        if self._process.is_alive():
            self._process.kill()
        self._process.join(END_SECONDS)
        self._pipe.close()


# -- in the process -------------------------------------------------------------------


def _serve(
    pipe: Connection,
    make: Callable[..., ReferenceEngine],
    args: Sequence[Any],
    threads: int,
) -> None:
    _end_with_the_parent()
    torch.set_num_threads(threads)
    try:
        engine = make(*args)
    except Exception as error:
        _reply(pipe, failure(error))
        return
    _reply(pipe, Done())
    order: Order | None = None
    while not isinstance(order, Close):
        try:
            data = pipe.recv_bytes()
        except EOFError:  # the parent has closed its end
            break
        reply: Reply
        try:
            order = decode(data, OrderMessage).order
            reply = order.obey(engine)
        except Exception as error:
            reply = failure(error)
        _reply(pipe, reply)


def _reply(pipe: Connection, reply: Reply) -> None:
    pipe.send_bytes(encode(ReplyMessage(reply)))


def _end_with_the_parent() -> None:
    """Also in the middle of an order."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
