"""The toy model's arithmetic, without any cache.

A token's successor is a hash of all that the token reads in all groups. So equal
histories give equal outputs, and one wrong slot changes them.
"""

from collections.abc import Sequence
from typing import Final

from kvplugin.contract import GroupKind
from kvplugin.testing.rules import PLAIN, GroupModel, Identity

VOCABULARY: Final = 50_000
"""Tokens are 0 to this, exclusive."""


def fold(group: int, found: Sequence[int]) -> int:
    """One number for what a token reads in one group."""
    return hash((group, *found))


def next_token(folds: Sequence[int]) -> int:
    """The successor of a token that read this, one fold a group."""
    return hash(tuple(folds)) % VOCABULARY


def right_fold(
    group: GroupModel, identity: Identity, histories: Sequence[int], position: int
) -> int:
    """What the token at `position` reads in a group if all is well."""
    if group.keeps_tokens:
        first = group.first_read(position)
        return fold(group.index, histories[first : position + 1])
    if group.kind is GroupKind.MAMBA:
        return fold(group.index, [histories[position]])
    if group.kind is GroupKind.CROSS_ATTENTION:
        return fold(group.index, identity.encoder_histories())
    return fold(group.index, [])


def continuation(
    groups: Sequence[GroupModel], identity: Identity, histories: Sequence[int], n: int
) -> list[int]:
    """The next `n` tokens of a request whose tokens have these histories."""
    histories, tokens = list(histories), []
    for _ in range(n):
        position = len(histories) - 1
        token = next_token(
            [right_fold(group, identity, histories, position) for group in groups]
        )
        tokens.append(token)
        histories += identity.extend(histories, [token])
    return tokens


def reference(
    groups: Sequence[GroupModel],
    prompt: Sequence[int],
    n: int,
    identity: Identity = PLAIN,
) -> list[int]:
    """The `n` tokens that the toy model generates after a prompt: what every run must
    give, whatever is cached, moved, lost, guessed or preempted on the way."""
    return continuation(groups, identity, identity.histories(prompt), n)


def propose(
    groups: Sequence[GroupModel], identity: Identity, histories: Sequence[int], n: int
) -> list[int]:
    """`n` drafts: the right ones, of which a third are made wrong."""
    return [
        (token + 1) % VOCABULARY if hash((histories[-1], j)) % 3 == 0 else token
        for j, token in enumerate(continuation(groups, identity, histories, n))
    ]
