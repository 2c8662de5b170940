"""What a prefill/decode deployment answered, and what it took."""

from dataclasses import dataclass

from kvplugin.integration.demo.pd.metrics import Moved


@dataclass(frozen=True, kw_only=True)
class Case:
    """One question, asked through the router and of one server alone."""

    question: str
    prompt_tokens: int
    ttft_s: float
    """Through the router: prefill, read and the first step of the decode server."""
    moved: Moved
    """Read by the decode server for this question."""
    text: str
    alone: str
    """What the prefill server alone answers."""

    @property
    def same(self) -> bool:
        """Whether the two texts are equal."""
        return self.text == self.alone


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """All questions."""

    title: str
    cases: list[Case]

    @property
    def differing(self) -> list[Case]:
        """Questions that were answered differently."""
        return [case for case in self.cases if not case.same]

    @property
    def unread(self) -> list[Case]:
        """Questions for which the decode server read nothing and computed itself."""
        return [case for case in self.cases if not case.moved.nbytes]

    @property
    def succeeded(self) -> bool:
        """Whether every prompt was read, and every text is that of one server."""
        return bool(self.cases) and not self.differing and not self.unread
