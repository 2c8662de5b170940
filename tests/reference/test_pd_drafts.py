"""Drafters with KV of their own, on both sides and on one side only."""

from typing import Any

import pytest

from kvplugin.integration.reference import AttentionDrafter, random_draft_model
from kvplugin.integration.reference.config import EngineConfig
from tests.reference.bench import shaped, tokens, window
from tests.reference.drafters import Oracle
from tests.reference.models import FULL, RECURRENT
from tests.reference.pd import Pair, spoil

DRAFTS = 3


def drafting(model: Any) -> dict[str, Any]:
    """A side with a drafter that has a layer."""

    def make(config: EngineConfig) -> AttentionDrafter:
        return AttentionDrafter(random_draft_model(model), config)

    return {"drafter": make, "num_drafts": DRAFTS}


@pytest.mark.parametrize("layers", [(FULL, FULL), (FULL, window(12))])
def test_drafters_on_both_sides(layers: Any) -> None:
    """What is handed over of the drafter's layer is what it goes on from: its drafts
    are those of an engine that has computed all itself."""
    model = shaped(layers)
    sides = {"producer": drafting(model), "consumer": drafting(model)}
    with Pair(model=model, block_size=8, **sides) as pair:
        for length in (9, 24, 41):
            prompt = tokens(length, seed=length)
            answer = pair.serve(prompt, 12)
            # The drafter's row of the last token depends on the token behind it, so
            # one token more is computed.
            assert length - 2 <= answer.num_cached_tokens <= length - 1
        groups = len(pair.p.engine.plan.scheduler.kv_cache_groups)
        assert groups >= len(set(layers))
        for group in range(groups):
            params = pair.prefill(other := tokens(39, seed=group))
            spoil(pair.p.engine, params, group)
            if _has_target_layers(pair, group):
                with pytest.raises(AssertionError):
                    pair.decode(other, params)
            else:
                pair.decode(other, params)  # worse drafts, the same answer


def _has_target_layers(pair: Pair, group: int) -> bool:
    spec = pair.p.engine.plan.scheduler.kv_cache_groups[group]
    return any(not name.startswith("draft") for name in spec.layer_names)


@pytest.mark.parametrize("side", ["producer", "consumer"])
def test_scenario_56_a_drafter_on_one_side_only(
    side: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Refused at the handshake, with the layers named; the text is right."""
    model = shaped((FULL, FULL))
    with Pair(model=model, block_size=8, **{side: drafting(model)}) as pair:
        for _ in range(2):
            answer = pair.serve(tokens(30), 8)
        assert answer.num_cached_tokens <= 24  # a local hit, nothing that was read
        assert pair.d.count("refused_peers") == 1
        assert pair.d.count("reads") == 0
    said = [record.getMessage() for record in caplog.records]
    (refusal,) = [message for message in said if "cannot be read" in message]
    assert "draft" in refusal


@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("layers", [(FULL, FULL), (RECURRENT, FULL, window(9))])
def test_drafts_without_kv_change_nothing(layers: Any, right: float) -> None:
    """Whoever drafts: states beside the running one are the consumer's own."""
    model = shaped(layers)

    def make(config: EngineConfig) -> Oracle:
        return Oracle(model, config.num_drafts, right)

    side = {"drafter": make, "num_drafts": DRAFTS}
    with Pair(model=model, block_size=8, consumer=side, producer=side) as pair:
        for length in (9, 40):
            answer = pair.serve(tokens(length, seed=length), 12)
            assert answer.num_cached_tokens == length - 1
