"""Transcripts of `drive.py` under vLLM's own manager."""

import math
from typing import Any

from tests.oracles import vllm_core
from tests.oracles.drive import Driver, Setup


def answer(setups: list[Setup]) -> list[Any]:
    """A transcript a setup, or the error that ended it as text."""
    return [_transcript(setup) for setup in setups]


def _transcript(setup: Setup) -> Any:
    hasher = vllm_core.hasher(setup.hash_block_size)
    try:
        manager = vllm_core.manager(
            setup.num_blocks,
            setup.groups,
            setup.max_model_len,
            setup.hash_block_size,
            scheduler_block_size=math.lcm(
                *(fields["block_size"] for _, fields in setup.groups)
            ),
            enable_caching=setup.enable_caching,
            use_eagle=setup.use_eagle,
            enable_kv_cache_events=setup.events,
        )
        return Driver(
            setup, manager, lambda name, tokens: vllm_core.request(name, tokens, hasher)
        ).run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
