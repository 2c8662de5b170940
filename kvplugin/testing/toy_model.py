"""A worker with a toy in place of a model: executes `SchedulerOutput`s on a content
model.

    model = ToyModel(memory, depth=2)
    model.submit(scheduler.schedule())            # in flight now
    if model.is_full:
        scheduler.update_from_output(model.execute())

A step is executed when the test says so, so with `depth=2` only after the next one was
scheduled: a block that was handed out too early is by then somebody else's. Outputs
depend on everything that is read (`toy_reference.py`); `reference` gives what they must
be.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from kvplugin.contract import GroupKind, WorkerHalf
from kvplugin.scheduler.output import ModelOutput, SchedulerOutput
from kvplugin.testing.content import ContentModel
from kvplugin.testing.rules import PLAIN, Identity
from kvplugin.testing.slots import WRONG
from kvplugin.testing.toy_reference import fold, next_token, propose, reference
from kvplugin.testing.toy_requests import InFlight, Part, Requests

_NEVER: Final = 1 << 62


class ToyModel:
    """Rows and tokens of requests, and the steps in flight.

    Args:
        memory: what is in the blocks; a watched pool makes it see early reuse.
        depth: steps in flight at most.
        num_drafts: tokens to propose after each sample.
        num_lookahead_tokens: slots behind the settled tokens that the draft model
            scribbles on.
        max_model_len: no draft goes beyond it.
        identity_of: what a request's bytes depend on beside its tokens, asked when a
            step that gives it rows is submitted.
        tokens_of: tokens of a resumed request if its `CachedRequestData` has none, as
            the scheduler knows them: the last samples of the model may have been
            discarded. None: the model's own.
        workers: worker halves of a connector, one a rank.
    """

    def __init__(
        self,
        memory: ContentModel,
        *,
        depth: int = 1,
        num_drafts: int = 0,
        num_lookahead_tokens: int = 0,
        max_model_len: int = _NEVER,
        identity_of: Callable[[str], Identity] = lambda request_id: PLAIN,
        tokens_of: Callable[[str], Sequence[int]] | None = None,
        workers: Sequence[WorkerHalf] = (),
    ) -> None:
        self.memory = memory
        self.depth = depth
        self.workers = workers
        self.invalid_block_ids: set[int] = set()
        """Blocks that the next output reports as not filled by a synchronous load."""
        self._groups = memory.groups
        self._num_drafts = num_drafts
        self._num_lookahead_tokens = num_lookahead_tokens
        self._max_model_len = max_model_len
        self._identity_of = identity_of
        self._tokens_of = tokens_of
        self._requests = Requests(memory.groups)
        self._in_flight: deque[InFlight] = deque()

    def reference(
        self, prompt: Sequence[int], n: int, identity: Identity = PLAIN
    ) -> list[int]:
        """See `toy_reference.reference`."""
        return reference(self._groups, prompt, n, identity)

    # -- steps in flight -----------------------------------------------------------

    def __len__(self) -> int:
        """Steps in flight."""
        return len(self._in_flight)

    @property
    def is_full(self) -> bool:
        """Whether the oldest step must be executed before the next is scheduled."""
        return len(self._in_flight) >= self.depth

    @property
    def in_flight(self) -> list[SchedulerOutput]:
        """The steps in flight, oldest first."""
        return [step.output for step in self._in_flight]

    @property
    def tracked(self) -> list[str]:
        """Requests that the worker has not been told to forget."""
        return self._requests.ids

    def submit(self, output: SchedulerOutput) -> None:
        """Put a step in flight; nothing is executed."""
        resumed = [data for data in output.scheduled_cached_reqs if data.resumed]
        tokens = {}
        for data in resumed:
            known = data.token_ids
            if known is None and self._tokens_of is not None:
                known = self._tokens_of(data.req_id)
            if known is not None:
                tokens[data.req_id] = list(known)
        given_rows = [data.req_id for data in output.scheduled_new_reqs]
        given_rows += [data.req_id for data in resumed]
        identities = {id_: self._identity_of(id_) for id_ in given_rows}
        step = InFlight(output, self.memory.grants(), identities, tokens)
        self._in_flight.append(step)

    def execute(self) -> ModelOutput:
        """Execute the oldest step in flight.

        Raises:
            ContentError: it reads or writes what is not its own.
        """
        step = self._in_flight.popleft()
        output = step.output
        self._requests.hear(step)
        self.memory.zero(output.new_block_ids_to_zero, step.grants)
        for worker in self.workers:
            worker.begin_step(output.connector_plan)
        parts = [
            self._requests.part(step, request_id, n)
            for request_id, n in output.num_scheduled_tokens.items()
        ]
        self._compute(parts)
        sampled = {p.request.id: tokens for p in parts if (tokens := self._settle(p))}
        drafts = {}
        if self._num_drafts:
            drafts = {p.request.id: self._propose(p) for p in parts if p.samples}
        for worker in self.workers:
            worker.end_step()
        outcomes = [worker.poll() for worker in self.workers]
        invalid, self.invalid_block_ids = self.invalid_block_ids, set()
        return ModelOutput(output.step, sampled, drafts, outcomes, frozenset(invalid))

    # -- a step --------------------------------------------------------------------

    def _compute(self, parts: Sequence[Part]) -> None:
        """States are taken, then everybody writes, then everybody reads: requests of
        one step may share what one of them writes."""
        for part in parts:
            for group, state in part.request.states.items():
                state.begin(self.memory, part.rows[group], part.step)
        for part in parts:
            self._write(part)
        todo = list(parts)
        while todo:
            # Who reads wrong bytes spoils its own, which others may have read before.
            spoilt = [part for part in todo if self._read(part)]
            todo = [p for p in parts if not p.is_wrong] if spoilt else []

    def _write(self, part: Part) -> None:
        step, request = part.step, part.request
        for group in self._groups:
            row = part.rows[group.index]
            if group.keeps_tokens:
                histories = step.histories[step.start : step.end]
                if part.is_wrong:
                    histories = [WRONG] * len(histories)
                self.memory.write(group.index, row, step.start, histories)
            elif group.kind is GroupKind.CROSS_ATTENTION and not request.encoded:
                encoder = request.identity.encoder_histories()
                self.memory.write(group.index, row, 0, encoder)
        request.encoded = True

    def _read(self, part: Part) -> bool:
        """Read everything; whether wrong bytes were read for the first time."""
        step = part.step
        last = range(step.known - 1, step.end) if part.samples else ()
        wrong = any(state.is_wrong for state in part.request.states.values())
        for group in self._groups:
            g, row = group.index, part.rows[group.index]
            if group.keeps_tokens:
                first = group.first_read(step.start)
                found = self.memory.read(g, row, range(first, step.end), step.histories)
                wrong |= WRONG in found
                part.folds[g] = [
                    fold(g, found[group.first_read(p) - first : p + 1 - first])
                    for p in last
                ]
            elif group.kind is GroupKind.CROSS_ATTENTION:
                encoder = part.request.identity.encoder_histories()
                found = self.memory.read(g, row, range(len(encoder)), encoder)
                wrong |= WRONG in found
                part.folds[g] = [fold(g, found)] * len(last)
            elif group.kind is GroupKind.MAMBA:
                bad = part.request.states[g].is_wrong
                part.folds[g] = [
                    fold(g, [WRONG if bad else step.histories[p]]) for p in last
                ]
            else:
                part.folds[g] = [fold(g, [])] * len(last)
        if wrong and not part.is_wrong:
            part.is_wrong = True
            self._write(part)
            return True
        return False

    def _settle(self, part: Part) -> list[int]:
        """Verify drafts, leave the states, and take in the new tokens."""
        request, step = part.request, part.step
        sampled: list[int] = []
        if part.samples:
            for folds in zip(*part.folds.values(), strict=True):
                sampled.append(next_token(folds))
                if len(sampled) > len(part.drafts):
                    break
                if part.drafts[len(sampled) - 1] != sampled[-1]:
                    break
        accepted = max(len(sampled) - 1, 0)
        for group, state in request.states.items():
            if part.is_wrong:
                state.initial = WRONG
            state.finish(self.memory, part.rows[group], step, accepted)
        settled = step.known + accepted
        stop = min(settled + self._num_lookahead_tokens, self._max_model_len)
        for group_model in self._groups:
            if group_model.keeps_tokens:
                g = group_model.index
                self.memory.scribble(g, part.rows[g], settled, stop)
        request.histories += request.identity.extend(request.histories, sampled)
        request.tokens += sampled
        return sampled

    def _propose(self, part: Part) -> list[int]:
        request = part.request
        return propose(
            self._groups, request.identity, request.histories, self._num_drafts
        )
