"""The narrow request record that the core needs.

`RequestLike` names what is read, with the attribute names of vLLM's `Request`, so that
vLLM's serves as it is. `Request` is a plain class for engines that have none.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import index
from typing import TYPE_CHECKING, Any, Final, Protocol

from kvplugin.errors import ConfigError, KVPluginError
from kvplugin.hashing.formats import HashFormat
from kvplugin.hashing.identity import AdapterLike, MediaLike

if TYPE_CHECKING:
    from kvplugin.hints import RequestHints

_TOKEN_LIMIT: Final = 2**32
_NEVER: Final = 2**63


class RequestError(KVPluginError, ValueError):
    """A request can't be what it says; the message names it and the field."""


class RequestLike(Protocol):
    """What the core reads of a request.

    Tokens are only appended, and `block_hashes` covers their full blocks: one hash
    for each `hash_block_size` tokens. Draft tokens are in neither.

    Two attributes more are read where a request has them: `num_in_flight_tokens`
    (computed tokens of steps whose output is not known yet; drafts among them may
    still be rejected) and `block_context` (a `BlockContext` for the eviction policy).
    """

    @property
    def request_id(self) -> str: ...
    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens known so far."""

    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int:
        """Leading tokens whose KV is in blocks, or will be when the step ends."""

    @property
    def all_token_ids(self) -> Sequence[int]: ...
    @property
    def block_hashes(self) -> list[bytes]: ...
    @property
    def skip_reading_prefix_cache(self) -> bool | None:
        """Whether its lookups find nothing; None: not set, so no."""

    @property
    def num_preemptions(self) -> int:
        """How often it lost its blocks."""

    @property
    def lora_request(self) -> AdapterLike | None: ...
    @property
    def cache_salt(self) -> str | None: ...
    @property
    def mm_features(self) -> Sequence[MediaLike]: ...
    @property
    def prompt_embeds(self) -> Any: ...
    @property
    def priority(self) -> int:
        """Lower goes first."""

    @property
    def arrival_time(self) -> float:
        """Seconds on any clock that all requests share; breaks ties of priority."""


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter; a new `epoch` if it was loaded again under its old name."""

    lora_name: str
    lora_path: str = ""
    epoch: int = 0


@dataclass(frozen=True)
class MediaRange:
    """Placeholder tokens [offset, offset + length) of a request."""

    offset: int
    length: int


@dataclass(frozen=True)
class MediaItem:
    """An image, a clip or the like; equal identifiers mean equal content."""

    identifier: str
    mm_position: MediaRange


class Request:
    """A request that owns its tokens and keeps their hashes up to date."""

    __slots__ = (
        "_next_hash_at",
        "_prompt_embeds_per_block_hashes",
        "_tokens",
        "arrival_time",
        "block_context",
        "block_hashes",
        "cache_salt",
        "hash_block_size",
        "hash_format",
        "hints",
        "kv_transfer_params",
        "lora_request",
        "mm_features",
        "num_computed_tokens",
        "num_in_flight_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "priority",
        "prompt_embeds",
        "request_id",
        "skip_reading_prefix_cache",
        "weight_epoch",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int] | None = None,
        *,
        hash_format: HashFormat | None = None,
        hash_block_size: int = 16,
        lora_request: AdapterLike | None = None,
        cache_salt: str | None = None,
        mm_features: Sequence[MediaLike] = (),
        prompt_embeds: Any = None,
        weight_epoch: int = 0,
        skip_reading_prefix_cache: bool | None = None,
        priority: int = 0,
        arrival_time: float = 0.0,
        hints: "RequestHints | None" = None,
        block_context: object = None,
        kv_transfer_params: Mapping[str, Any] | None = None,
    ) -> None:
        """A request with its prompt, hashed.

        Args:
            prompt_token_ids: may be None if `prompt_embeds` is the whole prompt; its
                token ids then read as zeros.
            hash_format: None leaves `block_hashes` empty (no prefix cache).
            hash_block_size: tokens that one hash covers.
            mm_features: media items, sorted by offset, within the prompt.
            prompt_embeds: one row a prompt token; see `HashedRequest` for its type.
            hints: what the client says of it; `Scheduler.add_request` makes a
                `block_context` of them.
            block_context: a `BlockContext`, what the eviction policy is told.
            kv_transfer_params: what the client says to connectors that exchange KV
                with other engines; nobody else reads it.
            weight_epoch: changes of the model's weights so far. Requests of different
                epochs share nothing.

        Raises:
            RequestError: no prompt, a token id outside 0 to 2**32-1, media that are
                out of order, overlap or leave the prompt, as many embeddings as there
                are no tokens, or no positive hash block size.
        """
        if hash_block_size < 1:
            raise RequestError(
                f"request {request_id!r}: hash_block_size is {hash_block_size}"
            )
        self.request_id = request_id
        self._tokens = _prompt(request_id, prompt_token_ids, prompt_embeds)
        self.num_prompt_tokens = len(self._tokens)
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0
        self.num_preemptions = 0
        self.lora_request = lora_request
        self.cache_salt = cache_salt
        self.mm_features = tuple(mm_features)
        _check_media(request_id, self.mm_features, self.num_prompt_tokens)
        self.prompt_embeds = prompt_embeds
        self.weight_epoch = weight_epoch
        self.skip_reading_prefix_cache = skip_reading_prefix_cache
        self.priority = priority
        self.arrival_time = arrival_time
        self.hints = hints
        self.block_context = block_context
        self.kv_transfer_params = kv_transfer_params
        self.block_hashes: list[bytes] = []
        self._prompt_embeds_per_block_hashes: dict[tuple[int, int], bytes] = {}
        self.hash_format = hash_format
        self.hash_block_size = hash_block_size
        self._next_hash_at = _NEVER if hash_format is None else hash_block_size
        self._update_hashes()

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Prompt and generated tokens; grows with the request, not to be changed."""
        return self._tokens

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens known so far."""
        return len(self._tokens)

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens."""
        return len(self._tokens) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the generated tokens."""
        return self._tokens[self.num_prompt_tokens :]

    def append_output_token_ids(self, token_ids: int | Iterable[int]) -> None:
        """Add generated tokens, and the hashes of the blocks that they complete.

        Raises:
            RequestError: an id outside 0 to 2**32-1; nothing is added.
        """
        if isinstance(token_ids, int) or not isinstance(token_ids, Iterable):
            token_ids = index(token_ids)
            if not 0 <= token_ids < _TOKEN_LIMIT:
                raise _bad_token(self.request_id, token_ids)
            self._tokens.append(token_ids)
        else:
            new = list(token_ids)
            _check_tokens(self.request_id, new)
            self._tokens += new
        if len(self._tokens) >= self._next_hash_at:
            self._update_hashes()

    def leave_away(self, num_tokens: int) -> None:
        """Drop tokens at the end of its prompt, before it is served: another engine
        computes them. A media item may then reach beyond the end.

        Raises:
            RequestError: nothing would be left, or it has generated tokens.
        """
        left = self.num_prompt_tokens - num_tokens
        if not 0 < left <= self.num_prompt_tokens or self.num_output_tokens:
            raise RequestError(
                f"request {self.request_id!r}: {num_tokens} of its tokens cannot be "
                f"left away, {self.num_prompt_tokens} of {self.num_tokens} are prompt"
            )
        if not num_tokens:
            return
        self.num_prompt_tokens = left
        del self._tokens[left:]
        if self.prompt_embeds is not None:
            self.prompt_embeds = self.prompt_embeds[:left]
        self.mm_features = tuple(
            item for item in self.mm_features if item.mm_position.offset < left
        )
        if self.hash_format is not None:
            del self.block_hashes[left // self.hash_block_size :]
            self._update_hashes()

    def take_hints(self, now: float) -> None:
        """It arrives: its hints become its `block_context`, unless it has one.

        Args:
            now: seconds, of the scheduler's clock.
        """
        if self.hints is not None and self.block_context is None:
            self.block_context = self.hints.context(now, self)

    def begin_weight_epoch(self, weight_epoch: int) -> None:
        """The model's weights have changed: hash all blocks anew.

        Raises:
            ConfigError: the hash format knows no epochs; nothing has changed.
        """
        before = self.weight_epoch, self.block_hashes
        self.weight_epoch, self.block_hashes = weight_epoch, []
        try:
            self._update_hashes()
        except ConfigError:
            self.weight_epoch, self.block_hashes = before
            raise

    def _update_hashes(self) -> None:
        if self.hash_format is None:
            return
        size = self.hash_block_size
        self.hash_format.extend(self.block_hashes, self, size)
        self._next_hash_at = (len(self.block_hashes) + 1) * size

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, num_tokens={self.num_tokens}, "
            f"num_computed_tokens={self.num_computed_tokens})"
        )


def _prompt(request_id: str, token_ids: Sequence[int] | None, embeds: Any) -> list[int]:
    tokens = [0] * len(embeds) if token_ids is None and embeds is not None else None
    if tokens is None:
        tokens = list(token_ids or ())
    if not tokens:
        raise RequestError(f"request {request_id!r} has an empty prompt")
    if embeds is not None and len(embeds) != len(tokens):
        raise RequestError(
            f"request {request_id!r}: {len(embeds)} rows of prompt_embeds for "
            f"{len(tokens)} prompt tokens"
        )
    _check_tokens(request_id, tokens)
    return tokens


def _check_tokens(request_id: str, tokens: list[int]) -> None:
    try:
        array("I", tokens)  # A fifth of the time that min and max take.
    except OverflowError:
        bad = next(token for token in tokens if not 0 <= token < _TOKEN_LIMIT)
        raise _bad_token(request_id, bad) from None


def _bad_token(request_id: str, token: int) -> RequestError:
    return RequestError(
        f"request {request_id!r}: token id {token} is outside 0 to {_TOKEN_LIMIT - 1}"
    )


def _check_media(
    request_id: str, items: Sequence[MediaLike], num_prompt_tokens: int
) -> None:
    for item in items:
        offset, length = item.mm_position.offset, item.mm_position.length
        if offset < 0 or length < 1 or offset + length > num_prompt_tokens:
            raise RequestError(
                f"request {request_id!r}: media item {item.identifier!r} covers tokens "
                f"{offset} to {offset + length} of a prompt of {num_prompt_tokens}"
            )
    for one, following in pairwise(items):
        end = one.mm_position.offset + one.mm_position.length
        if following.mm_position.offset < end:
            raise RequestError(
                f"request {request_id!r}: media item {following.identifier!r} begins "
                f"at token {following.mm_position.offset}, before "
                f"{one.identifier!r} ends at {end}: sort them, without overlap"
            )
