"""A window whose first block of ours begins before the tokens that the producer has.

After 56 tokens a window of 10 reads from token 47 on. With blocks of 4 the producer has
those from token 44 on, with blocks of 16 the consumer's first one begins with token 32:
what it holds of tokens 32 to 43 is nothing, and its own request does not need it. A
request that shares 48 tokens would.
"""

from collections.abc import Sequence

import pytest

from kvplugin.references import EngineReferences
from tests.reference.bench import tokens, window
from tests.reference.models import FULL
from tests.reference.pd import Pair


def serve_both() -> None:
    prompt = tokens(57)
    with Pair(
        (window(10), FULL),  # what tokens before the last one lack shows behind
        producer={"block_size": 4},
        consumer={"block_size": 16},
    ) as pair:
        assert pair.serve(prompt).num_cached_tokens == 56
        other = [*prompt[:48], *tokens(9, seed=8)]
        pair.decode(other, None)


def test_who_shares_the_block_does_not_get_what_was_not_read() -> None:
    serve_both()


def test_it_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(self: EngineReferences, ids: Sequence[int]) -> None:
        """Nothing."""

    monkeypatch.setattr(EngineReferences, "forget", forget)
    with pytest.raises(AssertionError):
        serve_both()
