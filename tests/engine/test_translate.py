"""What stock vLLM says of its tensors and settings, without an engine."""

import pytest
import torch

from kvplugin.errors import ConfigError
from kvplugin.integration.vllm.render import offload_transfer_config, parse_settings
from kvplugin.integration.vllm.translate import kv_tensors


def test_memory_that_the_cpu_cannot_address_is_refused_by_name():
    elsewhere = {"layer": torch.empty(4, 2, device="meta")}
    with pytest.raises(ConfigError, match="memory of meta"):
        kv_tensors(elsewhere, 4)


def test_a_tensor_is_described_by_address_and_byte_strides():
    cache = torch.empty(4, 3, 2, dtype=torch.bfloat16).transpose(1, 2)
    described = kv_tensors({"layer": cache}, 4)["layer"]
    assert described.address == cache.data_ptr()
    assert described.layout.shape == (4, 2, 3)
    assert described.layout.strides == (12, 2, 4)
    assert described.layout.block_axis == 0


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("8GiB", 8 << 30),
        ("8gib", 8 << 30),
        ("1.5G", 1_500_000_000),
        ("8kB", 8000),
        ("512", 512),
    ],
)
def test_sizes_are_read_as_people_write_them(text, nbytes):
    assert parse_settings([f"cpu_bytes_to_use={text}"]) == {"cpu_bytes_to_use": nbytes}


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["cpu_bytes_to_use"], "key=value"),
        (["cpu_bytes_to_use=1", "cpu_bytes_to_use=2"], "set twice"),
    ],
)
def test_settings_that_say_nothing_or_too_much_are_refused(texts, message):
    with pytest.raises(ConfigError, match=message):
        parse_settings(texts)


@pytest.mark.parametrize(
    "settings",
    [
        {"eviction_policy": "LRU"},
        {"copy_wait_ms": 1e300},
        {"blocks_per_chunk": 0},
        {"cpu_bytes_to_use": "8GiB"},
        {1: 2},
    ],
)
def test_what_the_engine_would_refuse_is_refused_when_rendered(settings):
    with pytest.raises(ConfigError):
        offload_transfer_config({"cpu_bytes_to_use": 1 << 30} | settings)
