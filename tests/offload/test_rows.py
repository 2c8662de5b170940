"""Rows of several groups: what of them is stored, what is filled, what is refused."""

from collections.abc import Sequence
from typing import Any

import pytest

from kvplugin.connectors.offload.messages import CopyOrder
from kvplugin.contract import GroupKind, Lookup, StateBlock
from kvplugin.errors import TransferError
from tests.offload.half import Half, engine, group, request
from tests.offload.setup_model import View, prompt

FULL, WINDOW, STATE = GroupKind.FULL, GroupKind.SLIDING_WINDOW, GroupKind.MAMBA
HYBRID = (group(FULL, 0), group(WINDOW, 1, window=6), group(STATE, 2))
"""A window of 6 keeps the last two blocks of 4, or three."""


def row(first: int, blocks: int) -> range:
    return range(first, first + blocks)


def stored(tokens: int = 32, step: int = 8, **settings: Any) -> Half:
    """A prompt has been computed `step` tokens a step, and all of it stored."""
    half = Half(engine(*HYBRID), **settings)
    view = request(prompt(tokens))
    count = tokens // 4
    half.admit(view, row(1, count), row(21, count), row(41, count))
    for computed in range(0, tokens, step):
        half.store(view, computed, step)
    half.scheduler.finished(view)
    half.scheduler.check()
    return half


class TestStored:
    """What a step leaves."""

    def test_a_step_leaves_its_window_and_the_state_at_its_end(self) -> None:
        half = Half(engine(*HYBRID))
        view = request(prompt(32))
        half.admit(view, row(1, 8), row(21, 8), row(41, 8))
        assert half.store(view, 0, 12) == {0: [1, 2, 3], 1: [21, 22, 23], 2: [43]}
        assert half.store(view, 12, 2) == {}
        assert half.store(view, 14, 10) == {0: [4, 5, 6], 1: [24, 25, 26], 2: [46]}
        assert half.store(view, 24, 8) == {0: [7, 8], 1: [27, 28], 2: [48]}
        assert not half.scheduler.watched

    def test_states_that_the_engine_names_are_kept(self) -> None:
        half = Half(engine(*HYBRID))
        view = request(prompt(32))
        half.admit(view, row(1, 8), row(21, 8), row(41, 8))
        named = [StateBlock(2, 8, 90), StateBlock(2, 10, 91), StateBlock(2, 40, 92)]
        assert half.store(view, 0, 18, states=named)[2] == [90]

    def test_a_state_a_block_is_kept_where_every_block_has_one(self) -> None:
        half = Half(engine(group(STATE, state_every_block=True)))
        view = request(prompt(32))
        half.admit(view, row(41, 8))
        assert half.store(view, 0, 13) == {0: [41, 42, 43]}
        assert half.store(view, 13, 11) == {0: [44, 45, 46]}

    def test_null_blocks_are_not_stored(self) -> None:
        half = Half(engine(*HYBRID))
        view = request(prompt(32))
        half.admit(view, row(1, 8), (0, 0, 23, *row(24, 5)), (0, 0, 0, *row(44, 5)))
        assert half.store(view, 0, 12) == {0: [1, 2, 3], 1: [23]}

    def test_a_prefix_with_a_hole_in_its_row_is_stored_up_to_it(self) -> None:
        half = Half(engine(group(FULL)))
        view = request(prompt(32))
        half.admit(view, (1, 2, 0, *row(4, 5)))
        assert half.store(view, 0, 32) == {0: [1, 2]}
        assert half.offered(prompt(32)) == Lookup(8)

    def test_a_window_block_that_may_have_left_is_not_stored(self) -> None:
        """Hashes that come late: the blocks behind the window are others' by then."""
        half = Half(engine(*HYBRID), offload_prompt_only=False)
        view = request(prompt(4))
        half.admit(view, row(1, 8), row(21, 8), row(41, 8))
        half.store(view, 0, 4)
        assert half.store(view, 4, 16) == {}
        known = request(prompt(4), prompt(28, 1))
        half.scheduler._requests["r"].request = known
        # At 20 tokens the window begins with token 15.
        assert half.store(known, 20, 1) == {0: [2, 3, 4, 5], 1: [24, 25]}

    def test_a_step_that_grows_the_row_stores_what_it_adds(self) -> None:
        half = Half(engine(*HYBRID))
        view = request(prompt(16))
        half.admit(view, (1,), (21,), (41,))
        half.store(view, 0, 4)
        new = ((2, 3), (22, 23), (0, 43))
        assert half.store(view, 4, 8, new=new) == {0: [2, 3], 1: [22, 23], 2: [43]}

    def test_what_a_second_request_shares_is_not_stored_again(self) -> None:
        half = stored()
        view = request([*prompt(20), *prompt(12, 1)], name="second")
        half.admit(view, row(1, 8), row(21, 8), row(41, 8), lookup=False)
        again = half.store(view, 0, 32)
        assert again == {0: [6, 7, 8], 1: [26, 27, 28], 2: [48]}

    def test_a_refused_chunk_ends_what_lies_behind_it_in_every_group(self) -> None:
        half = Half(engine(*HYBRID))

        class Script:
            def admit(self, keys: Sequence[bytes], ctx: Any) -> list[bool]:
                return [ctx.group > 0 or ctx.depth + i != 3 for i in range(len(keys))]

        half.scheduler._filter._policy = Script()
        view = request(prompt(32))
        half.admit(view, row(1, 8), row(21, 8), row(41, 8))
        assert half.store(view, 0, 8) == {0: [1, 2], 1: [21, 22], 2: [42]}
        assert half.store(view, 8, 24) == {0: [3], 1: [23]}
        assert half.stat("refused_blocks") == 5 + 5 + 1

    def test_a_window_block_that_is_refused_is_refused_alone(self) -> None:
        half = Half(engine(*HYBRID))

        class Script:
            def admit(self, keys: Sequence[bytes], ctx: Any) -> list[bool]:
                return [ctx.group != 1 or ctx.depth + i != 3 for i in range(len(keys))]

        half.scheduler._filter._policy = Script()
        view = request(prompt(32))
        half.admit(view, row(1, 8), row(21, 8), row(41, 8))
        kept = half.store(view, 0, 32)
        assert kept == {
            0: list(row(1, 8)),
            1: [21, 22, 23, 25, 26, 27, 28],
            2: [48],
        }


class TestLoaded:
    """What a boundary needs is loaded, and what else the engine will hash."""

    def order(self, half: Half, view: View, *rows: Sequence[int]) -> CopyOrder:
        assert half.admit(view, *rows) == Lookup(24)
        plan = half.step()
        assert plan is not None
        (order,) = plan.loads
        return order

    def test_only_what_the_boundary_needs_is_loaded(self) -> None:
        half = stored()
        view = request(prompt(32), name="second")
        rows = row(1, 6), (0, 0, 0, 0, 25, 26), (0, 0, 0, 0, 0, 46)
        order = self.order(half, view, *rows)
        assert [p.engine_ids for p in order.parts] == [[*row(1, 6)], [25, 26], [46]]
        assert not order.refusal
        half.end(order.id)
        assert half.stat("loaded_tokens") == 24

    def test_what_the_engine_has_allocated_besides_is_loaded_too(self) -> None:
        half = stored()
        view = request(prompt(32), name="second")
        order = self.order(half, view, row(1, 6), row(21, 6), (0, 0, 0, 0, 0, 46, 99))
        assert [len(p.engine_ids) for p in order.parts] == [6, 6, 1]
        assert not order.refusal

    @pytest.mark.parametrize(
        ("rows", "reason"),
        [
            ((row(1, 6), (0, 0, 0, 0, 0, 26), row(41, 6)), "4 of group 1 has no mem"),
            ((row(1, 6), row(21, 6), (0,) * 6), "5 of group 2 has no memory"),
            ((row(1, 5), row(21, 6), row(41, 6)), "5 of group 0 has no memory"),
            (
                (row(1, 6), row(21, 6), row(41, 6)),
                "block 0 of group 2 is not in host mem",
            ),
        ],
    )
    def test_a_row_that_cannot_be_filled_is_refused_as_data(
        self, rows: Sequence[Sequence[int]], reason: str
    ) -> None:
        half = stored()
        view = request(prompt(32), name="second")
        order = self.order(half, view, *rows)
        assert reason in order.refusal
        named = {block for part in order.parts for block in part.engine_ids}
        assert named == {block for one in rows for block in one if block}
        half.end(order.id, order.refusal)
        assert half.stat("failed_loads") == 1
        assert half.scheduler.lookup(view, 0) == Lookup(0)
        assert half.offered(prompt(32)) == Lookup(32), "nothing is wrong with the bytes"

    def test_a_key_that_has_gone_is_refused_as_data(self) -> None:
        half = stored()
        view = request(prompt(32), name="second")
        answer = half.scheduler.lookup(view, 0)
        half.scheduler.reset()
        rows = row(1, 6), (0, 0, 0, 0, 25, 26), (0, 0, 0, 0, 0, 46)
        half.scheduler.allocated(view, rows, answer.tokens)
        half.scheduler.check()
        plan = half.step()
        assert plan is not None
        assert "not in host memory" in plan.loads[0].refusal

    def test_an_engine_that_cannot_be_told_is_not_served_wrong_blocks(self) -> None:
        half = Half(engine(*HYBRID, reports_failed_loads=False))
        view = request(prompt(16))
        with pytest.raises(TransferError, match="block 0 of group 0 is not in host"):
            half.scheduler.allocated(view, (row(1, 4), row(21, 4), row(41, 4)), 16)

    def test_a_failed_load_takes_its_chunks_with_it_in_every_group(self) -> None:
        half = stored()
        view = request(prompt(32), name="second")
        rows = row(1, 6), (0, 0, 0, 0, 25, 26), (0, 0, 0, 0, 0, 46)
        order = self.order(half, view, *rows)
        half.end(order.id, "torn")
        assert half.offered(prompt(32)) == Lookup(0)
        assert half.stat("host_blocks_stored") == (8 - 6) + (8 - 2) + (4 - 1)

    def test_one_salt_does_not_hit_what_another_one_stored(self) -> None:
        half = stored()
        view = request(prompt(32), name="other")
        salted = [bytes(32 - len(h[:4])) + h[:4] for h in view.block_hashes]
        view._request.block_hashes[:] = salted
        assert half.scheduler.lookup(view, 0) == Lookup(0)
        half.admit(view, row(1, 8), row(21, 8), row(41, 8), lookup=False)
        assert len(half.store(view, 0, 32)[0]) == 8, "nor is it taken for stored"
