"""All tensor-parallel ranks in lock-step, in one process: from a step's description to
its new tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from kvplugin.errors import IntegrityError
from kvplugin.integration.reference.history import Span
from kvplugin.integration.reference.layers import Mixer
from kvplugin.integration.reference.model import HistoryOf, RankModel, decode
from kvplugin.integration.reference.runner import Runner
from kvplugin.integration.reference.sampling import Sampler
from kvplugin.scheduler import SchedulerOutput
from kvplugin.worker.batch import StepBatch
from kvplugin.worker.metadata import StepMetadata


@dataclass(frozen=True, slots=True)
class User:
    """What the workers need to know of a request beside its tokens and blocks."""

    sampler: Sampler
    num_prompt: int
    encoder_token_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True, eq=False)
class VerifiedStep:
    """A step whose new tokens are known, for a drafter."""

    batch: StepBatch
    spans: Sequence[Span]
    token_ids: Sequence[int]
    """Of all rows, drafts included."""
    hidden: torch.Tensor
    """[tokens, hidden], of the target."""
    sampled: Sequence[Sequence[int]]
    """New tokens of each request, accepted drafts first; none while its prompt is not
    done."""


class Drafter(Protocol):
    """Proposes tokens; its layers have KV of their own."""

    def mixers(self, rank: int) -> Sequence[Mixer]:
        """Its layers on a rank; they are grouped with the model's."""

    def propose(
        self, ranks: "Ranks", step: VerifiedStep
    ) -> Mapping[str, Sequence[int]]:
        """Drafts for the next step, by request; called after each step's sampling, so
        that it can write its own KV of the step's tokens."""


@dataclass(frozen=True, slots=True)
class Executed:
    """What came of a step."""

    sampled: Mapping[str, Sequence[int]] = field(default_factory=dict)
    drafts: Mapping[str, Sequence[int]] = field(default_factory=dict)
    logits: Mapping[str, Mapping[int, torch.Tensor]] = field(default_factory=dict)
    """By request: position of a sampled token -> the logits it came from."""


class Ranks:
    """The workers of one engine.

    Args:
        runners: one a rank.
        drafter: proposes tokens, if there is one.
    """

    def __init__(
        self, runners: Sequence[Runner], drafter: Drafter | None = None
    ) -> None:
        self.runners = tuple(runners)
        self.models: list[RankModel] = [runner.model for runner in runners]
        self._drafter = drafter

    def execute(self, output: SchedulerOutput, users: Mapping[str, User]) -> Executed:
        """Compute a step.

        Args:
            output: the step.
            users: what to know of each of its requests.
        """
        steps = [runner.begin(output) for runner in self.runners]
        step = steps[0]
        if not len(step):
            return Executed()
        token_ids, spans = self._inputs(step, output, users)
        model = self.models[0]
        x, batch = model.embed(token_ids), self.metadata.batch
        hidden = decode(self.models, x, batch.positions, spans, self.history_of(spans))
        logits = model.logits(hidden[batch.logits_indices])
        sampled, of_logits = self._sample(step, output, users, logits)
        for runner, mine in zip(self.runners, steps, strict=True):
            runner.settle(mine, sampled)
        drafts: Mapping[str, Sequence[int]] = {}
        if self._drafter is not None:
            verified = VerifiedStep(step, spans, token_ids, hidden, sampled)
            drafts = self._drafter.propose(self, verified)
        names = [request.req_id for request in step.requests]
        return Executed(
            {n: tokens for n, tokens in zip(names, sampled, strict=True) if tokens},
            drafts,
            dict(zip(names, of_logits, strict=True)),
        )

    @property
    def metadata(self) -> StepMetadata:
        """Of the step that is being computed, on the first rank.

        Raises:
            IntegrityError: there is none.
        """
        step = self.runners[0].step
        if step is None:
            raise IntegrityError("no step has begun")
        return step

    def history_of(self, spans: Sequence[Span]) -> HistoryOf:
        """Where the ranks' layers keep what they have seen, in this step."""
        return lambda rank, mixer: self.runners[rank].history(mixer, spans)

    def _inputs(
        self, step: StepBatch, output: SchedulerOutput, users: Mapping[str, User]
    ) -> tuple[list[int], list[Span]]:
        """Tokens of all rows, and which are whose."""
        tokens: list[int] = []
        spans = []
        counts = zip(step.num_computed, step.num_scheduled, strict=True)
        for request, (computed, scheduled) in zip(step.requests, counts, strict=True):
            drafts = output.scheduled_spec_decode_tokens.get(request.req_id, ())
            start, end = int(computed), int(computed + scheduled)
            known = request.token_ids[start : end - len(drafts)]
            if len(known) + len(drafts) != scheduled:
                raise IntegrityError(
                    f"request {request.req_id}: tokens {start} to {end} are scheduled, "
                    f"{len(drafts)} of them drafts; {len(request.token_ids)} are known"
                )
            user, first = users[request.req_id], len(tokens)
            tokens += [*known, *drafts]
            encoder = None
            if user.encoder_token_ids:
                encoder = self.models[0].embed(user.encoder_token_ids)
            spans.append(Span(first, len(tokens), start, user.num_prompt, encoder))
        return tokens, spans

    def _sample(
        self,
        step: StepBatch,
        output: SchedulerOutput,
        users: Mapping[str, User],
        logits: torch.Tensor,
    ) -> tuple[list[list[int]], list[dict[int, torch.Tensor]]]:
        """New tokens of each request, and the logits they came from.

        A draft that is what the target would have chosen is accepted; the first other
        one ends the request's new tokens.
        """
        sampled, rows, start = [], [], 0
        for index, request in enumerate(step.requests):
            drafts = output.scheduled_spec_decode_tokens.get(request.req_id, ())
            mine = logits[start : start + 1 + len(drafts)]
            start += len(mine)
            end = int(step.num_computed[index] + step.num_scheduled[index])
            known = end - len(drafts)
            tokens: list[int] = []
            if known == len(request.token_ids):
                sampler = users[request.req_id].sampler
                tokens = verify(sampler, mine, drafts, known)
            sampled.append(tokens)
            rows.append({known + i: mine[i] for i in range(len(tokens))})
        return sampled, rows


def verify(
    sampler: Sampler, logits: torch.Tensor, drafts: Sequence[int], position: int
) -> list[int]:
    """The tokens from `position` on: drafts that are right, and one more.

    Args:
        sampler: of the request.
        logits: [drafts + 1, vocabulary].
        drafts: in the order of their positions.
        position: of the first new token.
    """
    tokens: list[int] = []
    for row in logits:
        tokens.append(sampler.token(row, position + len(tokens)))
        place = len(tokens) - 1
        if place == len(drafts) or drafts[place] != tokens[-1]:
            break
    return tokens
