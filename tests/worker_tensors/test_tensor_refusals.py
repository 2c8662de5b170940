"""What cannot be allocated is refused by names: layer, spec, backend."""

from dataclasses import replace

import pytest

from kvplugin.errors import ConfigError
from kvplugin.spec import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
)
from kvplugin.worker.backend_table import BACKENDS
from kvplugin.worker.backends import BackendLayout
from kvplugin.worker.tensors import allocate_kv_cache
from tests.worker_tensors.cases import any_block_size, config_of
from tests.worker_tensors.shared import FLASH, FULL, STATES, WINDOW

TWO = config_of([(FULL, ["a"]), (WINDOW, ["b"])], 3)
ODD_STATES = MambaSpec(
    block_size=64, shapes=((3,), (4,)), dtypes=("bfloat16", "float32")
)
UNALIGNED = MambaSpec(
    block_size=64, shapes=((4,),), dtypes=("float32",), page_size_padded=18
)


def resized(config: KVCacheConfig, **changes: object) -> KVCacheConfig:
    return replace(
        config,
        kv_cache_tensors=tuple(
            replace(tensor, **changes) for tensor in config.kv_cache_tensors
        ),
    )


@pytest.mark.parametrize(
    ("config", "backend", "layout", "sizes", "why"),
    [
        (TWO, "FLASH_ATTN", "NHD", [4, 4], "'a': .*multiple.* of 16 tokens"),
        (TWO, "TRITON_ATTN", "HND", [4, 4], "'a'"),
        (TWO, None, "NHD", [4, 4], "'a': no attention backend"),
        (TWO, FLASH, "NHD", [4], "1 kernel block sizes for 2 groups"),
        (TWO, FLASH, "NHD", [3, 4], "'a': kernel blocks of 3 tokens do not divide"),
        (TWO, FLASH, "BLNHC", [4, 4], "one group of attention layers"),
        (TWO, FLASH, "HNDX", [4, 4], "unknown KV cache layout 'HNDX'"),
        (TWO, "FLASHMLA_SPARSE_FP8", "NHD", None, "'a': the backend"),
        (resized(TWO, size=5), FLASH, "NHD", None, "'a': its tensor of 5 bytes"),
        (resized(TWO, shared_by=("a",)), FLASH, "NHD", None, "layers b are not in"),
        (
            resized(config_of([(FULL, ["a", "b"])], 3), shared_by=("a", "b")),
            FLASH,
            "NHD",
            None,
            "layers a, b are not in exactly one",
        ),
        (
            replace(
                config_of([(FULL, ["a"])], 3),
                kv_cache_groups=(KVCacheGroupSpec(("a", "b"), FULL, {"b": "c"}),),
            ),
            FLASH,
            "NHD",
            None,
            "'b' uses the KV cache of 'c', which has none",
        ),
        (config_of([(ODD_STATES, ["m"])], 3), FLASH, "NHD", None, "'m': .* byte 6 of"),
        (config_of([(UNALIGNED, ["m"])], 3), FLASH, "NHD", None, "pages of 18 bytes"),
    ],
)
def test_refusal_names_what_to_change(
    config: KVCacheConfig,
    backend: BackendLayout | str | None,
    layout: str,
    sizes: list[int] | None,
    why: str,
) -> None:
    if isinstance(backend, str):
        backend = BACKENDS[backend]
    backends = {} if backend is None else dict.fromkeys("ab", backend)
    with pytest.raises(ConfigError, match=why):
        allocate_kv_cache(config, backends, layout, kernel_block_sizes=sizes)


def test_refusal_names_layer_spec_and_backend() -> None:
    with pytest.raises(ConfigError) as raised:
        allocate_kv_cache(TWO, dict.fromkeys("ab", BACKENDS["FLASH_ATTN"]), "NHD")
    for part in ("'a'", repr(FULL), "FLASH_ATTN", "LBNHC"):
        assert part in str(raised.value)


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_a_pool_without_blocks_is_refused(num_blocks: int) -> None:
    config = KVCacheConfig(
        num_blocks, (KVCacheTensor(0, ("a",)),), (KVCacheGroupSpec(("a",), FULL),)
    )
    with pytest.raises(ConfigError, match=f"num_blocks {num_blocks}: .* null block"):
        allocate_kv_cache(config, {"a": FLASH}, "NHD")


def test_two_layers_of_a_group_in_one_tensor_are_refused() -> None:
    config = config_of([(FULL, ["a", "b"])], 3)
    one = KVCacheTensor(3 * FULL.page_size_bytes, ("a", "b"))
    with pytest.raises(ConfigError, match="would overwrite each other"):
        allocate_kv_cache(
            replace(config, kv_cache_tensors=(one,)), dict.fromkeys("ab", FLASH), "NHD"
        )


@pytest.mark.parametrize("layout", ["LHBNC", "BHLNC"])
def test_padding_where_a_block_is_no_single_run_is_refused(layout: str) -> None:
    padded = replace(FULL, page_size_padded=FULL.page_size_bytes + 32)
    backend = any_block_size("FLASH_ATTN@0.32")
    with pytest.raises(ConfigError, match="axis head lies outside"):
        allocate_kv_cache(config_of([(padded, ["a"])], 3), {"a": backend}, layout)


def test_padded_pages_are_not_split() -> None:
    padded = replace(FULL, page_size_padded=FULL.page_size_bytes + 32)
    with pytest.raises(ConfigError, match="can't be split into kernel blocks"):
        allocate_kv_cache(
            config_of([(padded, ["a"])], 3),
            {"a": FLASH},
            "NHD",
            kernel_block_sizes=[2],
        )


def test_heads_outside_of_blocks_are_refused_beside_states() -> None:
    config = config_of([(FULL, ["a"]), (STATES, ["m"])], 3)
    backend = any_block_size("FLASH_ATTN@0.32")
    with pytest.raises(ConfigError, match="would not find a block in the same bytes"):
        allocate_kv_cache(config, {"a": backend}, "LHBNC")


def test_kind_without_tensors_is_refused() -> None:
    class Foreign(KVCacheSpec):
        page_size_bytes = 8

    with pytest.raises(ConfigError, match="'a': a Foreign has no tensors"):
        allocate_kv_cache(config_of([(Foreign(4), ["a"])], 3), {"a": FLASH}, "NHD")
