"""The side channel's listener: one thread, beside the producer's scheduler half."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from kvplugin.connectors.nixl import frames, stock, wire
from kvplugin.connectors.nixl.address import Address, check_host
from kvplugin.connectors.nixl.auth import UNSIGNED, Guard, StaleError
from kvplugin.connectors.nixl.channel import Answers
from kvplugin.connectors.nixl.grumble import Grumble
from kvplugin.connectors.nixl.listener import Connection, Listener
from kvplugin.connectors.nixl.wake import Wake
from kvplugin.errors import IntegrityError

logger = logging.getLogger("vllm.kvplugin.nixl")

_CLOSE_S: Final = 5.0
"""How long `close` waits for an answer that is being made."""


class ChannelServer:
    """Implements `kvplugin.connectors.nixl.channel.Server`.

    Whatever arrives, the thread goes on: what it cannot understand it logs, once a
    minute at most.

    Args:
        host: to listen on; a name is looked up once.
        port: to listen on; 0 for any that is free.
        answers: asked on the server's thread.
        secret: `kvplugin.connectors.nixl.auth.load_secret`.
        advertise_host: what `address` names in place of `host`.
        insecure: beyond this machine without a secret.
        clock: monotonic seconds, for the log.

    Raises:
        ConfigError: there is no such host, the port is taken, or it would listen beyond
            this machine without a secret (`check_exposure`).
    """

    def __init__(
        self,
        host: str,
        port: int,
        answers: Answers,
        *,
        secret: bytes,
        advertise_host: str = "",
        insecure: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_host(
            host, advertise_host=advertise_host, is_protected=bool(secret) or insecure
        )
        self._answers = answers
        self._guard = Guard(secret)
        self._garbage = Grumble("the side channel got what it cannot answer", clock)
        self._trouble = Grumble("the side channel could not answer", clock)
        self._stock = Grumble("the side channel refused a peer", clock)
        self._wake = Wake()
        try:
            self._listener = Listener(
                host,
                port,
                wake=self._wake,
                garbage=self._garbage,
                clock=clock,
                max_bytes=frames.MAX_QUESTION_FRAME,
            )
        except BaseException:
            self._wake.close()
            raise
        self._address = str(Address(advertise_host or host, self._listener.port))
        self._closing = False
        self._thread = threading.Thread(
            target=self._run, name="kvplugin-nixl-server", daemon=True
        )
        self._thread.start()

    @property
    def address(self) -> str:
        """Where others reach it."""
        return self._address

    def close(self) -> None:
        """Listen no more; waits for the answer that is being made, a few seconds at
        most."""
        if self._closing:
            return
        self._closing = True
        self._wake.set()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            logger.warning("the side channel's server hangs in an answer")
            return
        self._wake.close()

    def _run(self) -> None:
        try:
            while not self._closing:
                try:
                    self._turn()
                except Exception as error:  # whatever it was, the next peer is served
                    self._trouble(f"{type(error).__name__}: {error}")
        finally:
            self._listener.close()

    def _turn(self) -> None:
        """Answer what is there."""
        for connection, parts in self._listener.messages():
            if self._closing:
                return
            if replies := self._answer(connection, parts):
                self._listener.send(connection, [b"", *replies])

    def _answer(self, connection: Connection, parts: list[bytes]) -> list[bytes]:
        """The frames to send, after the empty one; none for garbage."""
        peer = connection.peer
        try:
            match frames.from_client(parts):
                case frames.StockHello(vllm):
                    return self._refuse_stock(peer, vllm)
                case frames.Asked() as asked:
                    return [self._answer_question(connection, asked)]
                case frames.Hello():
                    return [self._welcome()]
        except StaleError:
            return [self._welcome()]
        except IntegrityError as error:
            self._garbage(f"from {peer}: {error}")
        return []

    def _welcome(self) -> bytes:
        guard = self._guard
        return frames.welcome(guard.nonce, signed=guard.signer.has_secret)

    def _answer_question(self, connection: Connection, asked: frames.Asked) -> bytes:
        header, tag, body = asked
        try:
            self._guard.admit(header, tag, body)
        except StaleError:
            raise
        except IntegrityError as error:
            self._garbage(f"from {connection.peer}: {error}")
            refused = wire.encode(wire.Refused(reason=str(error)))
            return frames.answered(header.sequence, UNSIGNED, refused)
        self._listener.trust(connection)
        answer = wire.encode(self._ask(body))
        if len(answer) > wire.MAX_BYTES:
            self._trouble(f"an answer of {len(answer)} bytes is too large to send")
            answer = wire.encode(wire.Refused(reason="the answer is too large"))
        signature = self._guard.signer.answer_tag(tag, answer)
        return frames.answered(header.sequence, signature, answer)

    def _ask(self, body: bytes) -> wire.Answer:
        """What the scheduler half answers."""
        try:
            question = wire.decode_question(body)
        except IntegrityError as error:
            self._garbage(str(error))
            return wire.Refused(reason=str(error)[:1000])
        try:
            match question:
                case wire.Describe():
                    return self._answers.describe()
                case wire.Open():
                    return self._answers.open(question)
                case wire.Renew():
                    return self._answers.renew(question)
                case wire.Close():
                    return self._answers.close(question)
                case wire.Status():
                    return self._answers.status()
        except Exception as error:
            kind = type(question).__name__
            self._trouble(f"{kind}: {type(error).__name__}: {error}")
            return wire.Refused(reason=f"this engine failed to answer {kind}")

    def _refuse_stock(self, peer: str, vllm: str) -> list[bytes]:
        self._stock(stock.asked_us(vllm, peer))
        return stock.refusal(vllm)
