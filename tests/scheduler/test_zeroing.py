"""Blocks to zero are somebody's: whoever zeroes them destroys nobody's bytes."""

import pytest

from tests.core.manager_setups import full, mamba
from tests.testing.lab import Lab


@pytest.mark.parametrize("depth", [1, 2])
def test_blocks_to_zero_are_those_of_requests(depth: int) -> None:
    """Also when the request that is served first in a step loses its new blocks to
    another one, in the same step."""
    taken_back = 0
    for usable in range(14, 20):
        lab = Lab(
            (full(), mamba("align")),
            usable,
            depth=depth,
            policy="priority",
            long_prefill_token_threshold=8,
        )
        lab.add([*range(40)], 1, priority=9)
        lab.step()
        lab.add([*range(100, 124)], 1)
        while lab.scheduler.requests:
            output = lab.scheduler.schedule()
            rows = [lab.kv.get_block_ids(id_) for id_ in lab.scheduler.requests]
            owned = {block for groups in rows for row in groups for block in row}
            to_zero = output.new_block_ids_to_zero
            assert sorted(to_zero) == sorted(owned.intersection(to_zero))
            taken_back += bool(output.preempted_req_ids)
            lab.model.submit(output)
            if lab.model.is_full or not output.num_scheduled_tokens:
                lab.land()
        lab.drain()
    assert taken_back
