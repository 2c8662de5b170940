"""Which heads go where when two engines split them over different numbers of ranks."""

from typing import NamedTuple

from kvplugin.errors import LayoutMismatchError


class HeadSlice(NamedTuple):
    """Neighbouring heads, as each side numbers its own."""

    source_first: int
    target_first: int
    num_heads: int


class RankSlice(NamedTuple):
    """What one source rank has for a target rank."""

    source_rank: int
    heads: HeadSlice


def head_slices(
    num_heads: int, source_ranks: int, target_ranks: int, target_rank: int
) -> tuple[RankSlice, ...]:
    """Where a target rank finds its heads.

    Heads are split evenly and in order; with fewer heads than ranks, neighbouring
    ranks hold copies of one head (vLLM's rule for grouped queries). Targets that hold
    copies of one head read different copies of it while there are some.

    Args:
        num_heads: KV heads of the model.
        source_ranks: tensor-parallel ranks of the side that is read.
        target_ranks: of the side that is written.
        target_rank: the one whose heads are wanted.

    Raises:
        LayoutMismatchError: the heads cannot be split evenly over one of the sides.
    """
    wanted = _held(num_heads, target_ranks, target_rank)
    slices: list[RankSlice] = []
    per_source = len(_held(num_heads, source_ranks, 0))
    copies = max(1, source_ranks // num_heads)
    twin = target_rank % max(1, target_ranks // num_heads) % copies
    head = wanted.start
    while head < wanted.stop:
        owner, inside = divmod(head, per_source)
        count = min(per_source - inside, wanted.stop - head)
        slices.append(
            RankSlice(
                owner * copies + twin, HeadSlice(inside, head - wanted.start, count)
            )
        )
        head += count
    return tuple(slices)


def _held(num_heads: int, ranks: int, rank: int) -> range:
    """Heads that a rank holds."""
    if not 0 <= rank < ranks or num_heads < 1:
        raise LayoutMismatchError(f"rank {rank} of {ranks} with {num_heads} heads")
    if num_heads % ranks and ranks % num_heads:
        raise LayoutMismatchError(
            f"{num_heads} KV heads can't be split evenly over {ranks} ranks, nor "
            "copied evenly: use a tensor-parallel size that divides them or is a "
            "multiple"
        )
    per_rank = max(1, num_heads // ranks)
    first = rank * num_heads // ranks
    return range(first, first + per_rank)
