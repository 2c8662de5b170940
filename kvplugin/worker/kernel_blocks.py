"""Blocks of the manager and the smaller blocks that attention kernels read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvplugin.errors import ConfigError


@dataclass(frozen=True, slots=True)
class MultipleOf:
    """Any block size that is a multiple of `base` tokens."""

    base: int

    def __str__(self) -> str:
        """For messages."""
        return f"a multiple of {self.base}"


BlockSizes = Sequence[int | MultipleOf]
"""Tokens of a block that one backend's kernels can read."""


def reads_blocks_of(tokens: int, sizes: BlockSizes) -> bool:
    """Whether kernels that read blocks of `sizes` can read blocks of `tokens`."""
    return any(
        tokens % size.base == 0 if isinstance(size, MultipleOf) else tokens == size
        for size in sizes
    )


def select_kernel_block_size(
    block_size: int, supported: Mapping[str, BlockSizes]
) -> int:
    """The block size for the kernels of a group's attention backends.

    The manager's own if all backends read it, else the largest of the sizes they list
    that divides it and that all read (vLLM 0.19.1 `v1/worker/gpu_model_runner.py`).
    State groups have no kernel blocks: do not ask for them.

    Args:
        block_size: tokens of a block of the manager.
        supported: name of a backend -> what its kernels can read.

    Raises:
        ConfigError: there is none; the message names the backends.
    """
    if _all_read(block_size, supported):
        return block_size
    # A divisor that is a multiple of what a backend wants makes the block size one
    # too, so only sizes that somebody lists are left.
    listed = {
        size
        for sizes in supported.values()
        for size in sizes
        if isinstance(size, int) and block_size % size == 0
    }
    common = [size for size in listed if _all_read(size, supported)]
    if not common:
        wanted = "; ".join(
            f"{name} reads {' or '.join(map(str, sizes)) or 'none'}"
            for name, sizes in supported.items()
        )
        raise ConfigError(
            f"no kernel block size for block_size {block_size}: {wanted}. Set "
            "block_size to a multiple of a size that all of them read, or choose "
            "another attention backend."
        )
    return max(common)


def _all_read(tokens: int, supported: Mapping[str, BlockSizes]) -> bool:
    return all(reads_blocks_of(tokens, sizes) for sizes in supported.values())
