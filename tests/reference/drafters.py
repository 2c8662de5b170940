"""A drafter without layers, for the verification of drafts."""

import random
from collections.abc import Mapping, Sequence

from kvplugin.integration.reference import Model, dense_logits
from kvplugin.integration.reference.layers import Mixer
from kvplugin.integration.reference.ranks import Ranks, VerifiedStep


class Oracle:
    """Proposes what the target will say, but for every few tokens."""

    def __init__(self, model: Model, num_drafts: int, right: float) -> None:
        self._model = model
        self._num_drafts = num_drafts
        self._right = right
        self._random = random.Random(3)
        self.proposed = 0
        self._known: dict[tuple[int, ...], int] = {}

    def mixers(self, rank: int) -> Sequence[Mixer]:
        del rank
        return ()

    def propose(self, ranks: Ranks, step: VerifiedStep) -> Mapping[str, Sequence[int]]:
        del ranks
        drafts = {}
        for request, sampled in zip(step.batch.requests, step.sampled, strict=True):
            if sampled:
                drafts[request.req_id] = self._drafts(request.token_ids)
        return drafts

    def _drafts(self, tokens: Sequence[int]) -> list[int]:
        known = list(tokens)
        for _ in range(self._num_drafts):
            token = self._next(tuple(known))
            if self._random.random() > self._right:
                token = (token + 1) % self._model.config.vocab_size
            known.append(token)
            self.proposed += 1
        return known[len(tokens) :]

    def _next(self, tokens: tuple[int, ...]) -> int:
        if tokens not in self._known:
            logits = dense_logits(self._model, tokens)[-1]
            self._known[tokens] = int(logits.argmax())
        return self._known[tokens]
