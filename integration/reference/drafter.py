"""A drafter with a layer and KV of its own, on the blocks of the target's requests.

After each step it runs over the step's tokens once more, with the tokens that were
sampled known: rows of rejected drafts leave no KV and are not read. Then it goes on
token by token, as far as a request's blocks reach: these rows are scratch, which the
next step writes anew from what the target has made of the tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kvplugin.integration.reference.config import EngineConfig
from kvplugin.integration.reference.draft_model import DraftModel
from kvplugin.integration.reference.history import Span
from kvplugin.integration.reference.layers import Mixer
from kvplugin.integration.reference.memory import cache_settings
from kvplugin.integration.reference.model import decode
from kvplugin.integration.reference.ranks import Ranks, VerifiedStep
from kvplugin.integration.reference.runner import TokenPlaces
from kvplugin.kernels.host_slots import NO_ROW
from kvplugin.worker.drafts import draft_tokens, next_drafts, num_rejected_tokens


@dataclass(frozen=True, slots=True, eq=False)
class Front:
    """The last row of each request that is being drafted for."""

    rows: torch.Tensor
    """Of the block tables, int64 [requests]."""
    positions: torch.Tensor
    """int64 [requests]."""
    seq_lens: torch.Tensor
    """With these rows, int32 [requests]."""
    hidden: torch.Tensor
    """[requests, hidden], of the drafter."""


class AttentionDrafter:
    """Proposes tokens; a `ranks.Drafter`.

    Args:
        model: what it computes.
        config: of the engine that it serves.
    """

    def __init__(self, model: DraftModel, config: EngineConfig) -> None:
        self.config = config
        self._model = model
        self._num_drafts = config.num_drafts
        self._max_model_len = config.max_model_len
        cache, ranks = cache_settings(config), config.tensor_parallel_size
        self._parts = [
            model.model.rank(cache, rank, ranks, prefix="draft")
            for rank in range(ranks)
        ]
        self.logits: dict[str, torch.Tensor] = {}
        """Of the last step: request -> what its drafts came from, [drafts,
        vocabulary]."""

    def mixers(self, rank: int) -> Sequence[Mixer]:
        """See `Drafter.mixers`."""
        return self._parts[rank].mixers

    def propose(self, ranks: Ranks, step: VerifiedStep) -> Mapping[str, Sequence[int]]:
        """See `Drafter.propose`. Requests whose prompt is not done get no drafts, but
        KV; those without a block for the next row, or near `max_model_len`, get
        fewer."""
        front = self._read_step(ranks, step)
        found: dict[int, list[torch.Tensor]] = {row: [] for row in front.rows.tolist()}
        for left in reversed(range(self._num_drafts)):
            logits = self._parts[0].logits(front.hidden)
            for row, mine in zip(front.rows.tolist(), logits, strict=True):
                found[row].append(mine)
            if left:
                front = self._extend(ranks, front, logits.argmax(dim=-1))
        names = [request.req_id for request in step.batch.requests]
        self.logits = {
            names[row]: torch.stack(logits) for row, logits in found.items() if logits
        }
        return {
            name: logits.argmax(dim=-1).tolist() for name, logits in self.logits.items()
        }

    def _read_step(self, ranks: Ranks, step: VerifiedStep) -> Front:
        """Run over the tokens of a step, now that those behind them are known."""
        batch, device = ranks.metadata.batch, step.hidden.device
        num_sampled = torch.tensor([len(tokens) for tokens in step.sampled])
        num_drafts = torch.from_numpy(step.batch.num_drafts)
        num_rejected = num_rejected_tokens(num_drafts, num_sampled).to(device)
        tokens = draft_tokens(
            batch.query_start_loc, batch.num_computed, num_rejected, batch.num_tokens
        )
        seq_lens = batch.seq_lens - num_rejected
        everyone = torch.arange(len(seq_lens), device=device)
        places = TokenPlaces(tokens.rows, tokens.positions, everyone, seq_lens.tolist())
        next_tokens = _next_tokens(step, num_rejected.tolist())
        hidden = self._run(ranks, next_tokens, step.hidden, places, step.spans)
        drafting = num_sampled.nonzero().flatten().to(device)
        last = tokens.last[drafting]
        return Front(drafting, tokens.positions[last], seq_lens[drafting], hidden[last])

    def _extend(self, ranks: Ranks, front: Front, tokens: torch.Tensor) -> Front:
        """One more row for each request that has a block for it."""
        new = next_drafts(front.positions, front.seq_lens, self._max_model_len)
        group = ranks.runners[0].tensors.layers[self._parts[0].mixers[0].name].group
        table = ranks.runners[0].tables.tables[group]
        room = [table.length(row) for row in front.rows.tolist()]
        slots = torch.tensor(room).to(tokens.device) * table.shape.kernel_block_size
        goes_on = (new.rows != NO_ROW) & (new.positions < slots)
        chosen = goes_on.nonzero().flatten()
        rows, positions = front.rows[chosen], new.positions[chosen]
        seq_lens = new.seq_lens[chosen]
        spans = [
            Span(index, index + 1, position, 0)
            for index, position in enumerate(positions.tolist())
        ]
        places = TokenPlaces(rows.int(), positions, rows, seq_lens.tolist())
        hidden = self._run(
            ranks, tokens[chosen].tolist(), front.hidden[chosen], places, spans
        )
        return Front(rows, positions, seq_lens, hidden)

    def _run(
        self,
        ranks: Ranks,
        next_tokens: Sequence[int],
        hidden: torch.Tensor,
        places: TokenPlaces,
        spans: Sequence[Span],
    ) -> torch.Tensor:
        """The drafter's hidden states [tokens, hidden]."""
        if not next_tokens:
            return hidden
        x = self._model.inputs(self._parts[0].embed(next_tokens), hidden)
        positions = places.positions.clamp(max=self._max_model_len - 1)
        return decode(
            self._parts,
            x,
            positions,
            spans,
            lambda rank, mixer: ranks.runners[rank].history_at(mixer, places),
        )


def _next_tokens(step: VerifiedStep, num_rejected: Sequence[int]) -> list[int]:
    """Behind each token of a step the one that follows it; anything behind those that
    were rejected."""
    tokens: list[int] = []
    parts = zip(step.batch.requests, step.spans, num_rejected, strict=True)
    for request, span, rejected in parts:
        start, stop = span.num_computed + 1, span.end - rejected + 1
        known = request.token_ids[start:stop]
        tokens += known + [0] * (span.end - span.num_computed - len(known))
    return tokens
