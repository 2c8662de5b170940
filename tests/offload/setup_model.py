"""The model's engine configuration and its requests."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, Literal

from kvplugin.contract import EngineInfo, GroupInfo, GroupKind
from kvplugin.hashing import make_key
from kvplugin.hashing.own import kv_sha256
from kvplugin.layout import PageLayout
from tests.offload.content import BLOCK_BYTES, histories_of

HASHES: Final = kv_sha256()

VOCABULARY: Final = 1000
"""Generated tokens are below; those of `prompt` are not."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The kind of engine: small by default, so that everything is soon scarce."""

    block_size: int = 4
    hashes_per_block: int = 1
    usable_blocks: int = 32
    token_budget: int = 64
    ranks: int = 1
    drafts: int = 0
    """Tokens that a decode step guesses beyond the sampled one."""
    polls_first: bool = False
    """Whether a step ends only after its poll, as vLLM's do with a drafter."""
    prefix_caching: bool = True
    asks_pending_work: bool = True
    announces_resumed: bool = True
    """Whether `allocated` is called again once a load has ended, as by vLLM."""
    on_failed_load: Literal["recompute", "fail"] = "recompute"

    @property
    def hash_block_size(self) -> int:
        """Tokens that one hash of a request covers."""
        return self.block_size // self.hashes_per_block

    def info(self, rank: int = 0) -> EngineInfo:
        """What connectors may know of this engine."""
        num_blocks = self.usable_blocks + 1
        group = GroupInfo(
            index=0,
            kind=GroupKind.FULL,
            block_size=self.block_size,
            layers={"layer": PageLayout(BLOCK_BYTES, num_blocks)},
        )
        return EngineInfo(
            engine_id="model",
            groups=(group,),
            num_blocks=num_blocks,
            hash_block_size=self.hash_block_size,
            world_size=self.ranks,
            rank=rank,
            prefix_caching=self.prefix_caching,
            asks_pending_work=self.asks_pending_work,
        )


class Phase(Enum):
    """Where a request is in its life."""

    WAITING = auto()
    PARKED = auto()
    """Its row awaits a load."""
    LOADED = auto()
    """It still has its row, and waits to be scheduled."""
    RUNNING = auto()
    FINISHED = auto()


class Request:
    """A request as the engine keeps it."""

    def __init__(
        self, request_id: str, prompt: Sequence[int], max_new_tokens: int, setup: Setup
    ) -> None:
        self.request_id = request_id
        self.num_prompt_tokens = len(prompt)
        self.max_new_tokens = max_new_tokens
        self.tokens: list[int] = []
        self.histories: list[int] = []
        self.block_hashes: list[bytes] = []
        self.phase = Phase.WAITING
        self.failed = False
        self.row: list[int] = []
        self.num_computed = 0
        self.num_local = 0
        """Blocks of the row that were a local hit."""
        self.num_keyed = 0
        """Blocks of the row that the engine's prefix cache knows."""
        self._setup = setup
        self.append(prompt)

    @property
    def output(self) -> list[int]:
        """Generated tokens."""
        return self.tokens[self.num_prompt_tokens :]

    @property
    def longest_row(self) -> int:
        """Blocks that it needs before it can end."""
        tokens = self.num_prompt_tokens + self.max_new_tokens + self._setup.drafts
        return -(-tokens // self._setup.block_size)

    def append(self, tokens: Iterable[int]) -> None:
        """More tokens are known, and with them more hashes."""
        new = list(tokens)
        before = self.histories[-1] if self.histories else 0
        self.tokens += new
        self.histories += histories_of(before, new)
        size = self._setup.hash_block_size
        HASHES.extend_tokens(
            self.block_hashes, self.tokens, size, HASHES.root(block_size=size)
        )

    def continuation(self, count: int) -> list[int]:
        """The tokens that the model would generate next, one after the other."""
        tokens: list[int] = []
        history = self.histories[-1]
        for _ in range(count):
            tokens.append(history % VOCABULARY)
            (history,) = histories_of(history, tokens[-1:])
        return tokens

    def guess(self, count: int) -> list[int]:
        """A drafter's work: the continuation, of which the first few are right."""
        tokens = self.continuation(count)
        right = self.histories[-1] % (count + 1)
        return tokens[:right] + [(t + 1) % VOCABULARY for t in tokens[right:]]

    def key(self, block: int) -> bytes:
        """Of the request's block of this number, in the engine's prefix cache."""
        per_block = self._setup.hashes_per_block
        return make_key(self.block_hashes[(block + 1) * per_block - 1], 0)


class View:
    """A request as a connector sees it: `kvplugin.contract.RequestView`, no more.

    An object of its own, so that a test can tell who still remembers a request.
    """

    def __init__(self, request: Request) -> None:
        self._request = request

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def num_tokens(self) -> int:
        return len(self._request.tokens)

    @property
    def num_prompt_tokens(self) -> int:
        return self._request.num_prompt_tokens

    @property
    def block_hashes(self) -> Sequence[bytes]:
        return self._request.block_hashes


def prompt(tokens: int, seed: int = 0) -> list[int]:
    """A prompt that has no token in common with one of another seed."""
    assert tokens <= 1000
    return [(seed + 1) * VOCABULARY + position for position in range(tokens)]
