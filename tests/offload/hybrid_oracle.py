"""What host memory should offer, found by trying every length.

Nothing here knows the connector: which blocks a length needs comes from what a token
reads (`kvplugin.testing.rules`), which blocks there are from what a prompt's steps
wrote.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import lcm

from kvplugin.contract import GroupKind
from kvplugin.testing.rules import GroupModel
from tests.offload.hybrid_mixes import Mix

DENSE = frozenset({GroupKind.FULL, GroupKind.MLA})

Has = Callable[[int, int], bool]
"""Whether the block of this group and number is there."""


def needed(model: GroupModel, start: int, stop: int) -> range:
    """Blocks that must come for tokens [start, stop), so that the next one can go on
    from them and from what is there before `start`."""
    size = model.block_size
    if not model.keeps_tokens:
        return range(stop // size - (stop > start), stop // size)
    first = max(start, min(model.first_read(stop), stop))
    return range(first // size, stop // size)


def best_boundary(mix: Mix, num_tokens: int, has: Has, local: int = 0) -> int:
    """The most tokens, those of the local hit included, that a request of so many
    can go on from."""
    models = mix.models
    unit = lcm(*(model.block_size for model in models))
    for stop in range((num_tokens - 1) // unit * unit, local, -unit):
        if all(_can_end(mix, m, local, stop, num_tokens, has) for m in models):
            return stop
    return local


def _can_end(
    mix: Mix, model: GroupModel, local: int, stop: int, num_tokens: int, has: Has
) -> bool:
    if not all(has(model.index, i) for i in needed(model, local, stop)):
        return False
    if not (mix.rereads and model.keeps_tokens):
        return True
    behind = stop + model.block_size
    return behind <= num_tokens and has(model.index, stop // model.block_size)


@dataclass(frozen=True)
class Prefill:
    """A prompt that one engine has computed alone, and stored."""

    mix: Mix
    num_tokens: int
    budget: int
    blocks_per_chunk: int = 1
    start: int = 0
    """Tokens that it did not compute."""

    @property
    def step_ends(self) -> list[int]:
        """Computed tokens after each of its steps."""
        aligned = [m.block_size for m in self.mix.models if m.state_mode == "align"]
        unit = max(aligned, default=1)
        ends, at = [], self.start
        last = self.num_tokens // unit * unit
        while at < self.num_tokens:
            step = min(self.budget, self.num_tokens - at)
            if at < last:
                step = min(step // unit * unit, last - at)
            ends.append(at := at + step)
        return ends

    def has(self, group: int, block: int) -> bool:
        """Whether it left this block in host memory."""
        model = self.mix.models[group]
        end = (block + 1) * model.block_size
        if model.kind in DENSE:
            tokens = model.block_size * self.blocks_per_chunk
            return (block // self.blocks_per_chunk + 1) * tokens <= self.num_tokens
        if model.state_mode == "align":
            return end in self.step_ends
        return end <= self.num_tokens

    def offers(self, prompt: Sequence[int], shared: int) -> int:
        """Tokens that another request gets which shares so many with it."""

        def has(group: int, block: int) -> bool:
            model = self.mix.models[group]
            blocks = self.blocks_per_chunk if model.kind in DENSE else 1
            end = (block // blocks + 1) * blocks * model.block_size
            return end <= shared and self.has(group, block)

        return best_boundary(self.mix, len(prompt), has)
