"""Runs of the differential driver (`tests/oracles/drive.py`) under our manager."""

from typing import Any

from kvplugin import spec
from kvplugin.hashing import get_hash_format
from kvplugin.manager import KVCacheManager
from kvplugin.parity import Parity
from kvplugin.request import Request
from kvplugin.spec import KVCacheConfig, KVCacheGroupSpec
from tests.oracles.drive import Driver, Setup

Group = tuple[str, dict[str, Any]]

SEED = "0"
"""PYTHONHASHSEED of the oracles' processes."""


def attention(name: str, block_size: int = 4, **fields: Any) -> Group:
    """A small attention group."""
    common = {"num_kv_heads": 1, "head_size": 8, "dtype": "bfloat16"}
    return name, common | {"block_size": block_size} | fields


def mamba(mode: str, speculative: int = 0, block_size: int = 4) -> Group:
    """A small state group."""
    return "MambaSpec", {
        "block_size": block_size,
        "shapes": ((4,),),
        "dtypes": ("float32",),
        "mamba_cache_mode": mode,
        "num_speculative_blocks": speculative,
    }


FULL = attention("FullAttentionSpec")
WIDE = attention("FullAttentionSpec", 8)
MLA = attention("MLAAttentionSpec")
WINDOW = attention("SlidingWindowSpec", sliding_window=10)
LONG_WINDOW = attention("SlidingWindowSpec", sliding_window=20)
CHUNKED = attention("ChunkedLocalAttentionSpec", attention_chunk_size=16)
CROSS = attention("CrossAttentionSpec")


def spec_of(group: Group) -> spec.KVCacheSpec:
    """The spec that the group describes."""
    name, fields = group
    described: spec.KVCacheSpec = getattr(spec, name)(**fields)
    return described


class CheckedDriver(Driver):
    """Verifies every invariant after each step."""

    def step(self) -> None:
        super().step()
        self.kv.check()


def transcript(setup: Setup, format_name: str, parity: Parity) -> list[Any]:
    """What our manager answers."""
    hash_format = get_hash_format(format_name, seed=SEED)
    groups = tuple(
        KVCacheGroupSpec((f"layer{i}",), spec_of(group))
        for i, group in enumerate(setup.groups)
    )
    manager = KVCacheManager(
        KVCacheConfig(setup.num_blocks, (), groups),
        setup.max_model_len,
        setup.hash_block_size,
        enable_caching=setup.enable_caching,
        use_eagle=setup.use_eagle,
        enable_kv_cache_events=setup.events,
        hash_format=hash_format,
        parity=parity,
    )

    def request(name: str, tokens: list[int]) -> Request:
        return Request(
            name, tokens, hash_format=hash_format, hash_block_size=setup.hash_block_size
        )

    return CheckedDriver(setup, manager, request).run()


MIXES: list[list[Group]] = [
    [FULL],
    [MLA],
    [WINDOW],
    [CHUNKED],
    [mamba("align")],
    [FULL, WINDOW],
    [FULL, WINDOW, WINDOW],
    [FULL, WINDOW, LONG_WINDOW],
    [WINDOW, LONG_WINDOW],
    [FULL, CHUNKED],
]
"""Groups that both versions and we serve alike."""

V019_MIXES = [
    *MIXES,
    [WIDE, WINDOW],
    [FULL, mamba("align")],
    [mamba("all")],
    [mamba("none", 0, 256)],
    [FULL, mamba("all")],
    [FULL, mamba("all", 2)],
    [FULL, mamba("align", 1), mamba("align", 1)],
]
"""0.32 has no mode `all`, caches up to common multiples of block sizes only, gives
states before drafts back earlier, and beside dense groups keys states inside blocks."""


def setups(mixes: list[list[Group]], seeds: range) -> list[Setup]:
    """Every mix in every situation that makes sense for it."""
    return [
        Setup(groups, 10 + 50 * len(groups), 4, seed, **situation)
        for seed in seeds
        for groups in mixes
        for situation in _situations(groups)
    ]


def _situations(groups: list[Group]) -> list[dict[str, Any]]:
    kinds = {name for name, _ in groups}
    situations: list[dict[str, Any]] = [{"events": True}]
    aligned = {"chunk_multiple": 4} if "MambaSpec" in kinds else {}
    if groups == [mamba("none", 0, 256)]:
        return [{"enable_caching": False}]
    if "ChunkedLocalAttentionSpec" not in kinds:
        situations.append({"use_eagle": True, "lookahead": 2, "drafts": 2})
    if "MambaSpec" not in kinds:
        situations.append({"external": True})
    situations.append({"enable_caching": False})
    return [situation | aligned for situation in situations]
