"""What one engine answered, and what two engines' answers say together."""

from dataclasses import dataclass
from enum import StrEnum
from statistics import median


class Case(StrEnum):
    """Where the KV of a prompt's document came from."""

    COLD = "cold"
    RECOMPUTED = "recomputed"
    LOADED = "loaded"
    LOCAL = "local"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One question, its answer, and where the prompt's tokens came from."""

    document: str
    visit: int
    question: str
    text: str
    token_ids: list[int]
    logprobs: list[float]
    """Log-probability of each token of the answer."""
    ttft_s: float
    """Seconds from the request's arrival to its first token."""
    computed_tokens: int
    local_tokens: int
    loaded_tokens: int

    @property
    def case(self) -> Case:
        """The source of most of the prompt, as vLLM counted it."""
        most = max(self.computed_tokens, self.local_tokens, self.loaded_tokens)
        if most == self.loaded_tokens:
            return Case.LOADED
        if most == self.local_tokens:
            return Case.LOCAL
        return Case.RECOMPUTED if self.visit else Case.COLD


@dataclass(frozen=True, kw_only=True)
class EngineRun:
    """All questions, asked of one engine."""

    start_s: float
    """Seconds until the engine was ready."""
    answers: list[Answer]
    totals: dict[str, float]
    """vLLM's metrics afterwards, as `totals.read_totals` names them."""

    def ttft_s(self, case: Case) -> list[float]:
        """Times to first token of one case, in seconds; empty if it never occurred."""
        return [answer.ttft_s for answer in self.answers if answer.case is case]

    @property
    def prompt_tokens(self) -> int:
        return self.computed_tokens + self.local_tokens + self.loaded_tokens

    @property
    def computed_tokens(self) -> int:
        return sum(answer.computed_tokens for answer in self.answers)

    @property
    def local_tokens(self) -> int:
        return sum(answer.local_tokens for answer in self.answers)

    @property
    def loaded_tokens(self) -> int:
        return sum(answer.loaded_tokens for answer in self.answers)

    @property
    def waiting_s(self) -> float:
        """Seconds to first tokens, all questions together."""
        return sum(answer.ttft_s for answer in self.answers)

    @property
    def hit_rate(self) -> float:
        """Share of the prompts' tokens that were not computed."""
        return 1 - self.computed_tokens / self.prompt_tokens

    def offload(self, name: str) -> float:
        """The total of one of kvplugin's metrics, 0 where it did not run."""
        return self.totals.get(f"kvplugin_offload_{name}", 0.0)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The same questions without and with kvplugin."""

    title: str
    without: EngineRun
    with_kvplugin: EngineRun

    @property
    def pairs(self) -> list[tuple[Answer, Answer]]:
        """Answers to the same question: without, with."""
        return list(zip(self.without.answers, self.with_kvplugin.answers, strict=True))

    @property
    def differing(self) -> list[tuple[Answer, Answer]]:
        """The pairs whose answers are not the same tokens."""
        return [(a, b) for a, b in self.pairs if a.token_ids != b.token_ids]

    @property
    def largest_logprob_gap(self) -> float:
        """Largest difference of a token's log-probability where the tokens agree.

        Equal greedy tokens hide small errors; log-probabilities show them.
        """
        return max(
            (
                abs(mine - theirs)
                for a, b in self.pairs
                if a.token_ids == b.token_ids
                for mine, theirs in zip(a.logprobs, b.logprobs, strict=True)
            ),
            default=0.0,
        )

    @property
    def speedup(self) -> float | None:
        """Median time to first token, recomputed over loaded; None if either lacks."""
        recomputed = self.without.ttft_s(Case.RECOMPUTED)
        loaded = self.with_kvplugin.ttft_s(Case.LOADED)
        if not recomputed or not loaded:
            return None
        return median(recomputed) / median(loaded)

    @property
    def steady(self) -> bool:
        """Whether times can be trusted: equal work never took twice as long.

        Other work on the same cores shows here first.
        """
        spreads = (
            run.ttft_s(case)
            for run in (self.without, self.with_kvplugin)
            for case in (Case.COLD, Case.RECOMPUTED, Case.LOADED)
        )
        return all(max(times) < 2 * min(times) for times in spreads if times)

    @property
    def succeeded(self) -> bool:
        """Every answer is the same, and documents came back from CPU memory."""
        return not self.differing and bool(self.with_kvplugin.ttft_s(Case.LOADED))
