"""What bytes depend on, and which of them each attention kind reads: declared data.

Keys and values of a token depend on its request's identity (adapter, salt, weights)
and on every token up to it. A *history* is one number for all of that: equal histories
are equal bytes.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, Final

from kvplugin.contract import GroupKind
from kvplugin.errors import ConfigError
from kvplugin.spec import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

KIND_OF_SPEC: Final[Mapping[type[KVCacheSpec], GroupKind]] = MappingProxyType(
    {
        FullAttentionSpec: GroupKind.FULL,
        MLAAttentionSpec: GroupKind.MLA,
        SlidingWindowSpec: GroupKind.SLIDING_WINDOW,
        ChunkedLocalAttentionSpec: GroupKind.CHUNKED_LOCAL,
        MambaSpec: GroupKind.MAMBA,
        CrossAttentionSpec: GroupKind.CROSS_ATTENTION,
        EncoderOnlyAttentionSpec: GroupKind.OTHER,
    }
)
"""Subclasses follow their nearest base."""

FIRST_READ: Final[Mapping[GroupKind, Callable[[int, int], int]]] = MappingProxyType(
    {
        GroupKind.FULL: lambda position, reach: 0,
        GroupKind.MLA: lambda position, reach: 0,
        GroupKind.SLIDING_WINDOW: lambda position, reach: max(position - reach + 1, 0),
        GroupKind.CHUNKED_LOCAL: lambda position, reach: position - position % reach,
    }
)
"""First position that the token at `position` reads; the last one is its own. Kinds
that are not here keep no token slots: a state, an encoder's tokens, or nothing."""


@dataclass(frozen=True, slots=True)
class GroupModel:
    """A KV cache group as the content model knows it."""

    index: int
    kind: GroupKind
    block_size: int
    """Tokens of a block."""
    reach: int = 0
    """Tokens of the window or chunk."""
    state_mode: str = ""
    """Of states: one of `MAMBA_CACHE_MODES`."""
    num_draft_states: int = 0
    """States beside the running one."""

    @property
    def keeps_tokens(self) -> bool:
        """Whether a block has one slot a token."""
        return self.kind in FIRST_READ

    def first_read(self, position: int) -> int:
        """First position that the token at `position` reads (see `FIRST_READ`)."""
        return FIRST_READ[self.kind](position, self.reach)


def group_models(config: KVCacheConfig) -> tuple[GroupModel, ...]:
    """The groups of a configuration.

    Raises:
        ConfigError: a spec has no entry in `KIND_OF_SPEC`.
    """
    return tuple(
        group_model(index, group.kv_cache_spec)
        for index, group in enumerate(config.kv_cache_groups)
    )


def group_model(index: int, spec: KVCacheSpec) -> GroupModel:
    """One group.

    Raises:
        ConfigError: the spec has no entry in `KIND_OF_SPEC`.
    """
    if isinstance(spec, UniformTypeKVCacheSpecs):
        spec = next(iter(spec.kv_cache_specs.values()))
    for base in type(spec).__mro__:
        if base in KIND_OF_SPEC:
            reach = getattr(spec, "sliding_window", None)
            return GroupModel(
                index,
                KIND_OF_SPEC[base],
                spec.block_size,
                reach or getattr(spec, "attention_chunk_size", None) or 0,
                getattr(spec, "mamba_cache_mode", ""),
                getattr(spec, "num_speculative_blocks", 0),
            )
    raise ConfigError(
        f"{type(spec).__name__} has no entry in kvplugin.testing.rules.KIND_OF_SPEC: "
        f"declare what its layers read"
    )


@dataclass(frozen=True, slots=True)
class Identity:
    """What a request's bytes depend on beside its tokens."""

    base: Hashable = ()
    """Adapter, salt, weights."""
    at: Mapping[int, Hashable] = field(default_factory=dict)
    """What single positions depend on besides, e.g. an image."""
    num_encoder_tokens: int = 0
    """Tokens that cross attention reads."""

    def histories(self, tokens: Sequence[int]) -> list[int]:
        """At each of the leading tokens of a request: its history."""
        return self.extend([], tokens)

    def extend(self, before: Sequence[int], tokens: Iterable[int]) -> list[int]:
        """Histories of tokens that follow those with histories `before`."""
        last = before[-1] if before else _number(("identity", self.base))
        histories = []
        for position, token in enumerate(tokens, len(before)):
            # Tuples of ints hash equally in every process, so failures replay.
            last = hash((last, token))
            if position in self.at:
                last = hash((last, _number(self.at[position])))
            histories.append(last)
        return histories

    def encoder_histories(self) -> list[int]:
        """One number for each token of the encoder."""
        last = _number(("encoder", self.base))
        return [hash((last, i)) for i in range(self.num_encoder_tokens)]


PLAIN: Final = Identity()
"""The base model, no salt."""


def identity_of_request(request: Any, num_encoder_tokens: int = 0) -> Identity:
    """The identity of a request with the attributes of `RequestLike`.

    Prompt embeddings stand for themselves row by row and must compare by their `repr`.
    """
    base: list[Hashable] = []
    if (adapter := request.lora_request) is not None:
        epoch = getattr(adapter, "epoch", 0)
        base.append(("adapter", adapter.lora_name, adapter.lora_path, epoch))
    if request.cache_salt:
        base.append(("salt", request.cache_salt))
    if weight_epoch := getattr(request, "weight_epoch", 0):
        base.append(("weights", weight_epoch))
    at: dict[int, Hashable] = {}
    for item in request.mm_features:
        place = item.mm_position
        for i in range(place.length):
            at[place.offset + i] = ("media", item.identifier, i)
    if request.prompt_embeds is not None:
        for position, row in enumerate(request.prompt_embeds):
            at[position] = ("embedding", repr(row), at.get(position))
    return Identity(tuple(base), at, num_encoder_tokens)


def _number(value: Hashable) -> int:
    """The same in every process, unlike `hash` of strings."""
    return int.from_bytes(blake2b(repr(value).encode(), digest_size=8).digest())
