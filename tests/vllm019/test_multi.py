"""Inside vLLM 0.19's `MultiConnector`, which tells its connectors too little."""

from tests.engine import asking
from tests.engine.asking import BLOCK, assert_same
from tests.engine.host import offload
from tests.engine.prompts import tokens
from tests.engine.test_multi import assert_nothing_is_held, multi

PROMPT = tokens("multi", 3 * BLOCK + 9)


def test_each_of_two_is_idle_there_and_says_so_once(start_tiny):
    """Named no blocks, it would take those of a request's end for its beginning."""
    engine = start_tiny(
        kv_transfer_config=multi(offload(64 << 20), offload(32 << 20)),
        disable_hybrid_kv_cache_manager=True,
        max_num_batched_tokens=2 * BLOCK,
    )
    first = engine.run(asking.ask_one, PROMPT)
    for _ in range(2):
        assert engine.run(asking.reset)
        again = engine.run(asking.ask_one, PROMPT)
        assert again.cached_tokens == 0
        assert_same(first, again)
    assert_nothing_is_held(engine)
    assert engine.log.read_text().count("offload is idle") == 2
    engine.close()
