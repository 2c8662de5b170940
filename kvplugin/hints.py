"""What a client may say of a request, so that its blocks are kept well.

    {"kvplugin": {"priority": 10, "ttl_s": 300, "session": "chat 17", "turn": 3}}

Hints only help to choose among blocks that nobody uses: they change no output, and what
they protect is capped by the policy that reads them.
"""

from collections.abc import Mapping
from hashlib import sha256
from typing import Any, Final, Protocol

import msgspec

from kvplugin.errors import ConfigError, check_ranges
from kvplugin.hashing import AdapterLike
from kvplugin.policies.eviction import BlockContext
from kvplugin.request import RequestError
from kvplugin.settings import read_settings

HINTS_KEY: Final = "kvplugin"
"""Where hints stand in `extra_args` and `kv_transfer_params`."""


class Tenant(Protocol):
    """What tells whose request it is; `RequestLike` has it all."""

    @property
    def cache_salt(self) -> str | None: ...
    @property
    def lora_request(self) -> AdapterLike | None: ...


class RequestHints(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """Hints of one request. What is left out says nothing."""

    priority: int = 0
    """Blocks of a higher one are kept longer; 0, no priority, to 100."""
    ttl_s: float | None = None
    """Seconds from arrival for which its blocks are worth keeping; above 0."""
    session: str | None = None
    """Conversation that it belongs to, 1 to 256 characters; of its own tenant only."""
    turn: int = 0
    """Number of the request in its session, 0 for the first."""
    ends_session: bool = False
    """Nobody will continue the session after it."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant, naming the key.

        Raises:
            RequestError: a value of another type or out of its range.
        """
        try:
            check_ranges(self, _RANGES)
        except ConfigError as error:
            raise RequestError(str(error)) from None
        if self.session is not None and not 1 <= len(self.session) <= _MOST_CHARACTERS:
            raise RequestError(
                f"session has {len(self.session)} characters: it must have 1 to "
                f"{_MOST_CHARACTERS}"
            )
        if self.session is None and (self.turn or self.ends_session):
            raise RequestError("turn and ends_session are of a session: name it")

    def context(self, now: float, tenant: Tenant) -> BlockContext:
        """What the eviction policy is told.

        Args:
            now: seconds, of the clock of `EvictionPolicy.step`.
            tenant: the request. Its session is one of its salt and its adapter: who
                has another salt can neither join nor end it.
        """
        session = self.session
        return BlockContext(
            priority=self.priority,
            expires_at=None if self.ttl_s is None else now + self.ttl_s,
            session=None if session is None else f"{_space(tenant)}:{session}",
            turn=self.turn,
            ends_session=self.ends_session,
        )


_MOST_CHARACTERS: Final = 256
_RANGES: Final[Mapping[str, tuple[float, float]]] = {
    "priority": (0, 100),
    "ttl_s": (1e-6, 1e9),
    "turn": (0, 2**31),
}


def _space(tenant: Tenant) -> str:
    """Of the sessions of one tenant; does not tell its salt to who reads it."""
    adapter = tenant.lora_request
    name = None if adapter is None else adapter.lora_name
    return sha256(repr((tenant.cache_salt, name)).encode()).hexdigest()[:16]


def hints_of(
    extra_args: Mapping[str, Any] | None,
    kv_transfer_params: Mapping[str, Any] | None = None,
) -> RequestHints | None:
    """The hints under the key `kvplugin`, a mapping or the text of a JSON object.

    Args:
        extra_args: of the request's sampling parameters; asked first.
        kv_transfer_params: of the request.

    Returns:
        None: there are no hints.

    Raises:
        RequestError: an unknown hint or a wrong value, or a place that is no mapping;
            it names where it stands.
    """
    places = {"extra_args": extra_args, "kv_transfer_params": kv_transfer_params}
    for place, given in places.items():
        if given is None:
            continue
        if not isinstance(given, Mapping):
            raise RequestError(
                f"{place} is of type {type(given).__name__}: it must be an object"
            )
        hints = given.get(HINTS_KEY)
        if hints is not None:
            return _read(hints, f"{place}[{HINTS_KEY!r}]")
    return None


def _read(hints: object, where: str) -> RequestHints:
    if isinstance(hints, str):
        try:
            hints = msgspec.json.decode(hints)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise RequestError(f"{where} is no JSON: {error}") from None
    if isinstance(hints, RequestHints):
        return hints
    if not isinstance(hints, Mapping):
        raise RequestError(
            f"{where} is of type {type(hints).__name__}: it must be an object"
        )
    try:
        return read_settings(RequestHints, hints, where)
    except ConfigError as error:
        raise RequestError(str(error)) from error
