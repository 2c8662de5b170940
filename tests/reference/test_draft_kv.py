"""The KV of a drafter: what would show if it were wrong, and what cannot be right."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import kvplugin.integration.reference.drafter as drafter_module
import kvplugin.integration.reference.engine as engine_module
from kvplugin.integration.reference import (
    DraftModel,
    EngineConfig,
    LayerConfig,
    Model,
)
from kvplugin.integration.reference.connector import offload
from kvplugin.integration.reference.ranks import Ranks, VerifiedStep
from kvplugin.kernels.host_slots import NO_ROW
from tests.reference.drafting import (
    Checked,
    draft_and_serve,
    target_of,
)
from tests.reference.models import (
    FULL,
    MIXES,
    WINDOW,
    prompts,
    settings,
)
from tests.reference.test_offload import CONFIG


@pytest.mark.parametrize("layer", [FULL, WINDOW], ids=["full", "window"])
def test_rejected_tokens_that_count_change_proposals(
    layer: LayerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        drafter_module, "num_rejected_tokens", lambda drafts, _: 0 * drafts
    )
    drafter, _, _ = draft_and_serve(
        target_of(MIXES["full"]), settings(num_drafts=3), [prompts(3)], layer=layer
    )
    assert drafter.other > 5


class Stale(Checked):
    """Keeps the KV of accepted drafts that it wrote from its own hidden states."""

    def propose(self, ranks: Ranks, step: VerifiedStep) -> Mapping[str, Sequence[int]]:
        self._num_verified = torch.from_numpy(step.batch.num_drafts)
        return super().propose(ranks, step)

    def _run(self, *args: Any) -> torch.Tensor:
        ranks, tokens, hidden, places, spans = args
        batch = ranks.metadata.batch
        if len(places.rows) == len(batch.rows):
            is_new = batch.positions > batch.num_computed[batch.rows]
            is_draft = is_new & (self._num_verified[batch.rows] > 0)
            rows = torch.where(is_draft, NO_ROW, places.rows)
            places = replace(places, rows=rows)
        return super()._run(ranks, tokens, hidden, places, spans)


@pytest.mark.parametrize("layer", [FULL, WINDOW], ids=["full", "window"])
def test_kv_of_drafts_is_not_that_of_tokens(layer: LayerConfig) -> None:
    drafter, _, _ = draft_and_serve(
        target_of(MIXES["full"]),
        settings(num_drafts=3),
        [prompts(3)],
        layer=layer,
        kind=Stale,
    )
    assert drafter.other > 5


class Writes(Checked):
    """Looks which rows of its layer's KV change."""

    def __init__(self, target: Model, model: DraftModel, config: EngineConfig) -> None:
        super().__init__(target, model, config)
        self.odd = 0
        """Steps after which other rows have changed than those of settled tokens."""

    def propose(self, ranks: Ranks, step: VerifiedStep) -> Mapping[str, Sequence[int]]:
        runner = ranks.runners[0]
        (kv,) = runner.tensors.layers["draft.0"].tensors
        before = kv.clone()
        drafts = super().propose(ranks, step)
        changed = (kv != before).flatten(2).any(dim=2).flatten().nonzero().flatten()
        table, wanted = runner.tables.tables[0], set()
        for row, (request, start) in enumerate(
            zip(step.batch.requests, step.batch.num_computed.tolist(), strict=True)
        ):
            end = start + int(step.batch.num_scheduled[row])
            for token in range(start, min(end, len(request.token_ids) - 1)):
                wanted.add(table.row(row)[token // 4] * 4 + token % 4)
        self.odd += set(changed.tolist()) != wanted
        return drafts


class Unmasked(Writes):
    """Leaves rejected tokens their rows."""

    def _run(self, *args: Any) -> torch.Tensor:
        ranks, tokens, hidden, places, spans = args
        places = replace(places, rows=ranks.metadata.batch.rows)
        return super()._run(ranks, tokens, hidden, places, spans)


def test_rejected_tokens_leave_no_kv() -> None:
    config, batch = settings(num_drafts=1), prompts(3)
    found = {}
    for kind in (Writes, Unmasked):
        drafter, _, _ = draft_and_serve(
            target_of(MIXES["full"]), config, [batch, batch], kind=kind
        )
        assert isinstance(drafter, Writes)
        assert drafter.rejected
        found[kind] = drafter.odd
    assert not found[Writes]
    assert found[Unmasked]


HEAD = [5, 9, 13, 2, 7, 40, 33, 21, 11, 8, 19, 4]
ONE = [*HEAD, 1, 2, 3, 4, 5, 6]
OTHER = [*HEAD, 31, 22, 13, 44, 50, 6, 3]
"""They differ right behind a block's end."""


def test_a_hit_is_one_block_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The KV of a block's last token depends on the token behind it: without the drop
    it would be that of somebody else."""
    target, config = target_of(MIXES["full"]), settings(num_drafts=3)
    drafter, served, _ = draft_and_serve(target, config, [[ONE], [OTHER]])
    assert served.answers["request-2"].num_cached_tokens == 8
    assert not drafter.other

    make = engine_module._make_manager
    monkeypatch.setattr(
        engine_module,
        "_make_manager",
        lambda plan, config, _, plugins: make(plan, config, False, plugins),
    )
    drafter, served, _ = draft_and_serve(target, config, [[ONE], [OTHER]])
    assert served.answers["request-2"].num_cached_tokens == 12
    assert drafter.other


def test_kv_of_another_continuation_costs_drafts_and_no_output() -> None:
    """Where the drop does not help: of two blocks with equal tokens the older one is
    hit, and the block behind it is the other's."""
    drafter, served, _ = draft_and_serve(
        target_of(MIXES["full"]), settings(num_drafts=3), [[ONE], [OTHER], [OTHER]]
    )
    answers = list(served.answers.values())
    assert answers[-1].num_cached_tokens == 12
    assert drafter.other


def test_host_memory_brings_no_block_that_another_continuation_wrote() -> None:
    """It knows of the drafter, and drops the last block as the engine does."""
    drafter, served, _ = draft_and_serve(
        target_of(MIXES["full"]),
        settings(num_drafts=3),
        [[ONE], [OTHER]],
        connector=offload(CONFIG),
    )
    assert list(served.answers.values())[-1].num_cached_tokens == 8
    assert not drafter.other
