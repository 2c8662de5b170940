"""What other engines say of themselves, looked into one a step.

To decode a description and to negotiate with it takes the engine's thread up to some
0.1 s: others wait for the next steps. What was refused is remembered by its digest, as
clients can make up any number of addresses at which the same answers.
"""

import hashlib
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias

from kvplugin.connectors.negotiate import Agreement, Refusal, negotiate
from kvplugin.connectors.nixl.describe import decode_engine
from kvplugin.connectors.nixl.descriptor import EngineDescriptor
from kvplugin.errors import KVPluginError
from kvplugin.wire import encode

_TIMES_OURS: Final = 4
_MOST_TP: Final = 32
"""A description has as many layers as ours, so grows with its ranks: four times as many
as ours, and this many at least, must fit."""
_ANY_BYTES: Final = 64 << 10
"""More, for other layouts, names and NIXL's addresses."""
_MOST_REFUSED: Final = 1024
_MOST_WAITING: Final = 16


class Unfit(NamedTuple):
    """A description that does not fit."""

    reason: str
    engine_id: str = ""
    """Who gave it, if that much is known."""


class Fits(NamedTuple):
    """One that does."""

    descriptor: EngineDescriptor
    agreement: Agreement


Then: TypeAlias = Callable[[Fits | Unfit], None]


class Descriptions:
    """Those that are to be looked into.

    Args:
        reader: our own.
    """

    def __init__(self, reader: EngineDescriptor) -> None:
        self._reader = reader
        times = max(_TIMES_OURS, -(-_MOST_TP // reader.tp_size))
        self._most_bytes = times * len(encode(reader)) + _ANY_BYTES
        self._refused: OrderedDict[bytes, Unfit] = OrderedDict()
        """By digest, the last one used last."""
        self._waiting: deque[tuple[bytes, bytes, Then]] = deque()
        """Digest, description and who is told."""
        self._may_look = True

    def refusal(self, encoded: bytes) -> Unfit | None:
        """Why it is refused, if that is known without looking into it."""
        if len(encoded) > self._most_bytes:
            return Unfit(
                f"its description has {len(encoded)} bytes, more than the "
                f"{self._most_bytes} that one of this engine's model may have here"
            )
        digest = _digest(encoded)
        if digest in self._refused:
            self._refused.move_to_end(digest)
        return self._refused.get(digest)

    def add(self, encoded: bytes, then: Then) -> bool:
        """Have it looked into, in this step or a later one.

        Returns:
            False if too many wait already: its engine has to be asked again.
        """
        if len(self._waiting) >= _MOST_WAITING:
            return False
        self._waiting.append((_digest(encoded), encoded, then))
        self.look()
        return True

    def next_step(self) -> None:
        """One more may be looked into."""
        self._may_look = True

    def look(self) -> bool:
        """Look into the next one, if none has been in this step. Those that are known
        to be refused by now are answered at once.

        Returns:
            Whether anybody was told.
        """
        were_waiting = len(self._waiting)
        while self._waiting:
            digest, encoded, then = self._waiting[0]
            known = self._refused.get(digest)
            if known is None and not self._may_look:
                break
            self._waiting.popleft()
            then(self._look_into(digest, encoded) if known is None else known)
        return len(self._waiting) < were_waiting

    def _look_into(self, digest: bytes, encoded: bytes) -> Fits | Unfit:
        self._may_look = False
        engine_id = ""
        try:
            found = decode_engine(encoded)
            engine_id = found.engine_id
            return Fits(found, negotiate(self._reader, found))
        except Refusal as refusal:
            refused = Unfit("; ".join(refusal.reasons), engine_id)
        except KVPluginError as error:
            refused = Unfit(str(error), engine_id)
        self._refused[digest] = refused
        if len(self._refused) > _MOST_REFUSED:
            self._refused.popitem(last=False)
        return refused


def _digest(encoded: bytes) -> bytes:
    return hashlib.sha256(encoded).digest()
