"""A drafter that compares itself with a dense one, and what it is tried on."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from kvplugin.groups import blocks_per_request, reserved_blocks
from kvplugin.integration.reference import (
    AttentionDrafter,
    DraftModel,
    EngineConfig,
    LayerConfig,
    Model,
    ReferenceEngine,
    SamplingParams,
    dense_drafts,
    random_draft_model,
    random_model,
    target_hidden,
)
from kvplugin.integration.reference.ranks import Ranks, VerifiedStep
from tests.reference.models import (
    FULL,
    Seen,
    serve,
    tiny,
)

STATES = "full+recurrent"
TOLERANCE = 1e-9


class Proposal(NamedTuple):
    """What was proposed after these tokens."""

    known: list[int]
    drafts: list[int]
    logits: torch.Tensor


class Checked(AttentionDrafter):
    """Keeps its proposals for a comparison with dense ones, and counts.

    Args:
        target: whose tokens it proposes.
        model: what it computes.
        config: of the engine.
    """

    def __init__(self, target: Model, model: DraftModel, config: EngineConfig) -> None:
        super().__init__(model, config)
        self._target = target
        self._proposals: dict[str, list[Proposal]] = {}
        self.accepted = self.rejected = self.same = self.other = self.cut_short = 0

    def propose(self, ranks: Ranks, step: VerifiedStep) -> Mapping[str, Sequence[int]]:
        drafts = super().propose(ranks, step)
        requests = zip(
            step.batch.requests,
            step.batch.num_drafts.tolist(),
            step.sampled,
            strict=True,
        )
        for request, verified, sampled in requests:
            if verified:
                self.accepted += len(sampled) - 1
                self.rejected += verified + 1 - len(sampled)
            if sampled:
                name, known = request.req_id, list(request.token_ids)
                new = Proposal(known, list(drafts[name]), self.logits[name])
                self._proposals.setdefault(name, []).append(new)
        return drafts

    def compare(self) -> None:
        """With dense ones. What the target makes of a token does not depend on later
        ones, so one forward does for all proposals of a request."""
        for proposals in self._proposals.values():
            longest = max((proposal.known for proposal in proposals), key=len)
            hidden = target_hidden(self._target, longest)
            for known, drafts, logits in proposals:
                assert longest[: len(known)] == known
                before = hidden[: len(known) - 1]
                tokens, wanted = dense_drafts(self._model, before, known, len(drafts))
                self.cut_short += len(drafts) < self._num_drafts
                is_same = float((logits - wanted).abs().max()) <= TOLERANCE
                assert not is_same or drafts == tokens
                self.same += is_same
                self.other += not is_same


def target_of(layers: Iterable[LayerConfig], seed: int = 0) -> Model:
    """Its later layers change little, and latents have the pages of other layers."""
    config = tiny(tuple(layers), kv_lora_rank=24).config
    return random_model(config, seed, depth_scale=0.4)


def draft_and_serve(
    target: Model,
    config: EngineConfig,
    rounds: Sequence[Sequence[Sequence[int]]],
    *,
    layer: LayerConfig = FULL,
    kind: type[Checked] = Checked,
    **more: Any,
) -> tuple[Checked, ReferenceEngine, Seen]:
    """`models.serve`, which compares outputs, with a drafter."""
    drafter = kind(target, random_draft_model(target, layer), config)
    more = {"params": SamplingParams(max_tokens=12)} | more
    served, seen = serve(target, config, rounds, drafter=drafter, **more)
    drafter.compare()
    assert drafter.same
    return drafter, served, seen


def fewest(target: Model, config: EngineConfig, layer: LayerConfig) -> int:
    """The smallest pool that serves a request of full length, and drafts for it."""
    drafter = AttentionDrafter(random_draft_model(target, layer), config)
    plan = ReferenceEngine(target, config, drafter=drafter).plan
    groups = plan.scheduler.kv_cache_groups
    return blocks_per_request(groups, plan.limits) + reserved_blocks(
        groups, plan.limits
    )
