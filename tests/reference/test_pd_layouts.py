"""KV that is laid out otherwise on either side: what arrives is what was computed."""

from typing import Any

import pytest

from kvplugin.integration.reference import LayerConfig
from tests.reference.bench import tokens, window
from tests.reference.models import DIFFKV, FULL, MLA
from tests.reference.pd import Pair, spoil

PROMPT = tokens(100)


def assert_read(pair: Pair, prompt: list[int] = PROMPT, **how: Any) -> None:
    """The prompt is read, but for its last token, and the answer is right; so it is
    of what was read that it was made."""
    answer = pair.serve(prompt, **how)
    assert answer.num_cached_tokens == len(prompt) - 1
    assert pair.d.count("reads") == 1
    assert pair.d.count("failed_reads") == 0


def assert_seen(pair: Pair, group: int = 0, **how: Any) -> None:
    """A wrong byte in what is read of a group would be seen."""
    prompt = tokens(len(PROMPT), seed=9)
    params = pair.prefill(prompt)
    spoil(pair.p.engine, params, group)
    with pytest.raises(AssertionError):
        pair.decode(prompt, params, **how)
    pair.d.engine.reset_prefix_cache()


@pytest.mark.parametrize("block_sizes", [(16, 16), (64, 48)])
@pytest.mark.parametrize(
    ("theirs", "ours"), [("NHD", "HND"), ("HND", "NHD"), ("NHD", "NHD")]
)
def test_order_of_heads_and_tokens(
    theirs: str, ours: str, block_sizes: tuple[int, int]
) -> None:
    producer = {"layout": theirs, "block_size": block_sizes[0]}
    consumer = {"layout": ours, "block_size": block_sizes[1]}
    with Pair(producer=producer, consumer=consumer) as pair:
        assert_read(pair)
        assert_seen(pair)


SIZES = (16, 32, 48, 64)


@pytest.mark.parametrize("ours", SIZES)
@pytest.mark.parametrize("theirs", SIZES)
def test_scenario_55_block_sizes_that_differ(theirs: int, ours: int) -> None:
    """Every pairing is right for every request, for prompts that end anywhere in a
    block."""
    sizes: dict[str, Any] = {
        "producer": {"block_size": theirs},
        "consumer": {"block_size": ours},
    }
    with Pair(**sizes) as pair:
        for length in (1, 2, 15, 16, 17, 47, 64, 65, 96, 130):
            pair.serve(tokens(length, seed=length), max_tokens=2)
        assert pair.d.count("reads") == 9  # of one token there is nothing to read
        assert pair.d.count("failed_reads") == 0
        if (theirs, ours) in ((32, 16), (16, 32), (64, 48)):
            assert_seen(pair)


MIXED: dict[str, Any] = {
    "heads and blocks": ({"layout": "HND", "block_size": 32}, {"block_size": 16}),
    "layers beside each other": ({"layout": "BLNHC"}, {"layout": "NHD"}),
    "layers apart": ({"layout": "NHD"}, {"layout": "BLNHC", "block_size": 32}),
    "layers inside heads": ({"layout": "BHLNC"}, {"layout": "NHD", "block_size": 16}),
    "into layers inside heads": ({"layout": "NHD"}, {"layout": "BHLNC"}),
    "keys before values": ({"backend": "FLASH_ATTN"}, {"backend": "FLASH_ATTN@0.32"}),
    "keys beside values": ({"backend": "FLASH_ATTN@0.32"}, {"backend": "FLASHINFER"}),
    "smaller blocks of the kernels": (
        {"block_size": 48, "kernel_block_size": 16},
        {"block_size": 32},
    ),
    "smaller blocks of our kernels": (
        {"block_size": 32, "layout": "HND"},
        {"block_size": 64, "kernel_block_size": 16},
    ),
}


@pytest.mark.parametrize("mix", MIXED)
def test_layouts_that_differ_in_more_than_one_way(mix: str) -> None:
    theirs, ours = MIXED[mix]
    with Pair(
        producer={"block_size": 16} | theirs, consumer={"block_size": 16} | ours
    ) as pair:
        assert_read(pair)
        assert_seen(pair)


def test_reads_that_do_not_fit_into_the_staging_memory_at_once() -> None:
    with Pair(
        connector={"staging_bytes": 1 << 16},
        producer={"layout": "HND", "block_size": 32},
        consumer={"block_size": 16},
    ) as pair:
        assert_read(pair, tokens(200))  # 100 KiB a layer


KINDS: dict[str, tuple[LayerConfig, ...]] = {
    "values of another size": (DIFFKV, DIFFKV),
    "latents": (MLA, MLA),
    "latents and keys": (MLA, FULL),
    "windows": (FULL, window(40)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_layers_in_other_blocks_and_orders(kind: str) -> None:
    layers = KINDS[kind]
    with Pair(
        layers,
        producer={"block_size": 32, "layout": "HND"},
        consumer={"block_size": 16},
    ) as pair:
        assert_read(pair)
        groups = pair.p.engine.plan.scheduler.kv_cache_groups
        for group in range(len(groups)):
            assert_seen(pair, group)


def test_numbers_are_not_converted() -> None:
    """Another dtype of the cache is refused, naming both, and the request computes."""
    with Pair(
        producer={"kv_cache_dtype": "float32", "block_size": 16},
        consumer={"block_size": 16},
    ) as pair:
        assert pair.serve(PROMPT).num_cached_tokens == 0
        assert pair.d.count("refused_peers") == 1
        assert pair.serve(tokens(90, seed=3)).num_cached_tokens == 0
        assert pair.d.count("refused_peers") == pair.d.count("handshakes") == 1
        assert pair.d.count("missed_reads") == 2
