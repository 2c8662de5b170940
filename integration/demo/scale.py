"""How much work the demo does, and how small it makes vLLM's KV cache."""

from dataclasses import dataclass
from typing import Final

BLOCK_TOKENS: Final = 128
"""vLLM's block size on a CPU."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes of one run.

    All documents are visited in turn, `visits` times; a visit asks `questions`
    questions. The KV cache holds fewer tokens than the other documents bring between
    two visits, so a document is gone when its turn comes again.

    vLLM computes a prompt in chunks of `chunk_tokens`. A document fills `chunks` of
    them and ends in the block that follows, so the question always begins a chunk of
    its own: whether the document was computed, loaded or still there, the question
    meets the same arithmetic, and greedy answers can be compared exactly.
    """

    documents: int
    visits: int
    questions: int
    chunks: int
    cache_blocks: int
    answer_tokens: int = 20
    chunk_tokens: int = 1280

    @property
    def prefix_tokens(self) -> int:
        """Tokens of a document that a cache can hold: whole chunks, whole blocks."""
        return self.chunks * self.chunk_tokens

    @property
    def text_tokens(self) -> int:
        """Upper limit of a document's text; leaves half a block to the question."""
        return self.prefix_tokens + BLOCK_TOKENS // 2

    @property
    def cache_tokens(self) -> int:
        """Tokens that vLLM's KV cache holds."""
        return self.cache_blocks * BLOCK_TOKENS

    @property
    def requests(self) -> int:
        """Questions asked of each engine."""
        return self.documents * self.visits * self.questions


FULL: Final = Scale(documents=4, visits=3, questions=2, chunks=3, cache_blocks=72)
QUICK: Final = Scale(
    documents=3, visits=2, questions=2, chunks=1, cache_blocks=20, answer_tokens=8
)
