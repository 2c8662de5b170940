"""Host memory keeps the recurrent states that `kvp_choose_checkpoints` chooses."""

from collections.abc import Collection

import pytest

from kvplugin import hookimpl
from kvplugin.contract import GroupKind, StateBlock
from kvplugin.hooks import CheckpointContext
from tests.offload.half import BLOCK, Half, engine, group, request


class EveryOther:
    """Keeps a state after every second block."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    @hookimpl
    def kvp_choose_checkpoints(self, ctx: CheckpointContext) -> Collection[int]:
        self.asked.append((ctx.request.request_id, ctx.group))
        return ctx.boundaries[1::2]


def stored_blocks(half: Half, blocks: int) -> list[int]:
    """Boundaries in blocks that prompts of these lengths are offered."""
    return [half.offered(range(n * BLOCK)).tokens // BLOCK for n in range(1, blocks)]


@pytest.mark.parametrize("every_block", [True, False])
def test_only_chosen_states_are_kept(every_block: bool) -> None:
    plugin = EveryOther()
    half = Half(
        engine(
            group(GroupKind.FULL),
            group(GroupKind.MAMBA, 1, state_every_block=every_block),
        ),
        plugins=[plugin],
    )
    view = request(range(6 * BLOCK), name="r")
    half.admit(view, range(1, 7), range(11, 17))
    states = [StateBlock(1, n * BLOCK, 10 + n) for n in range(1, 6)]
    half.store(view, 0, 6 * BLOCK, states=() if every_block else states)
    half.scheduler.finished(view)
    assert plugin.asked == [("r", 1)]
    assert stored_blocks(half, 7) == [0, 2, 2, 4, 4, 6]


def test_without_a_plugin_all_are_kept() -> None:
    half = Half(
        engine(group(GroupKind.FULL), group(GroupKind.MAMBA, 1, state_every_block=True))
    )
    view = request(range(4 * BLOCK))
    half.admit(view, range(1, 5), range(11, 15))
    half.store(view, 0, 4 * BLOCK)
    half.scheduler.finished(view)
    assert stored_blocks(half, 5) == [1, 2, 3, 4]
