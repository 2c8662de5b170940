"""The connector's configuration: what is wrong is said, by its key."""

import math
from typing import Any, get_args, get_type_hints

import msgspec
import pytest

from kvplugin.connectors.offload.config import OffloadConfig
from kvplugin.errors import ConfigError, KVPluginError
from kvplugin.settings import read_settings

WHERE = "kv_connector_extra_config"


def parse(**settings: Any) -> OffloadConfig:
    """What a user wrote, size of host memory included unless he left it out."""
    given = {"cpu_bytes_to_use": 1 << 30} | settings
    chosen = {key: value for key, value in given.items() if value is not ...}
    return read_settings(OffloadConfig, chosen, WHERE)


def test_the_size_of_host_memory_is_all_that_must_be_said() -> None:
    config = parse()
    assert config.cpu_bytes_to_use == 1 << 30
    assert config == OffloadConfig(cpu_bytes_to_use=1 << 30)


def test_a_missing_size_of_host_memory_is_named() -> None:
    with pytest.raises(ConfigError, match=f"{WHERE}: .*`cpu_bytes_to_use`"):
        parse(cpu_bytes_to_use=...)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("cpu_byte_to_use", "cpu_bytes_to_use"),
        ("block_per_chunk", "blocks_per_chunk"),
        ("lookup_wait", "lookup_wait_ms"),
        ("on_startup_error", "on_start_error"),
        ("Eviction_Policy", "eviction_policy"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(
    wrong: str, right: str
) -> None:
    with pytest.raises(ConfigError, match=f"'{wrong}' in {WHERE}.*mean '{right}'"):
        parse(**{wrong: 1})


def test_a_key_like_no_other_is_refused_with_all_known_ones() -> None:
    with pytest.raises(ConfigError) as refusal:
        parse(zzz=1)
    assert "Did you mean" not in str(refusal.value)
    for field in msgspec.structs.fields(OffloadConfig):
        assert field.name in str(refusal.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("cpu_bytes_to_use", "1 GiB"),
        ("cpu_bytes_to_use", None),
        ("cpu_bytes_to_use", True),
        ("eviction_policy", 3),
        ("blocks_per_chunk", 2.5),
        ("blocks_per_chunk", "2"),
        ("offload_prompt_only", "yes"),
        ("offload_prompt_only", 1),
        ("min_load_tokens", 1.5),
        ("copy_wait_ms", "2 ms"),
        ("lookup_wait_ms", []),
        ("on_start_error", "ignore"),
        ("on_start_error", True),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_by_its_key(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{WHERE}: .*{key}"):
        parse(**{key: value})


def test_a_word_that_is_none_of_the_known_is_refused_with_all_of_them() -> None:
    with pytest.raises(ConfigError, match=r"on_start_error is 'ignore' and must be "):
        parse(on_start_error="ignore")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("cpu_bytes_to_use", 0),
        ("cpu_bytes_to_use", -1),
        ("cpu_bytes_to_use", 0.5),
        ("cpu_bytes_to_use", math.nan),
        ("cpu_bytes_to_use", math.inf),
        ("blocks_per_chunk", 0),
        ("min_load_tokens", 0),
        ("copy_wait_ms", -0.1),
        ("copy_wait_ms", math.inf),
        ("lookup_wait_ms", -1),
        ("lookup_wait_ms", math.nan),
        ("lookup_wait_ms", math.inf),
    ],
)
def test_a_value_out_of_range_is_refused_by_its_key(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{WHERE}: {key}=.* must be"):
        parse(**{key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("cpu_bytes_to_use", 1),
        ("cpu_bytes_to_use", 1.5e11),
        ("blocks_per_chunk", 16),
        ("min_load_tokens", 1),
        ("copy_wait_ms", 0),
        ("lookup_wait_ms", 0),
        ("offload_prompt_only", False),
    ],
)
def test_values_up_to_the_limits_are_taken(key: str, value: Any) -> None:
    assert getattr(parse(**{key: value}), key) == value


def test_the_engine_may_end_or_go_on_without_offload_if_it_does_not_start() -> None:
    values = get_args(get_type_hints(OffloadConfig)["on_start_error"])
    assert values == ("fail", "disable")
    for value in values:
        assert parse(on_start_error=value).on_start_error == value
    assert parse().on_start_error == "fail"


def test_a_wrong_setting_is_a_value_error_and_one_of_ours() -> None:
    with pytest.raises(ValueError, match="blocks_per_chunk"):
        parse(blocks_per_chunk=0)
    with pytest.raises(KVPluginError, match="blocks_per_chunk"):
        parse(blocks_per_chunk=0)


def test_a_configuration_does_not_change() -> None:
    with pytest.raises(AttributeError):
        parse().blocks_per_chunk = 2  # type: ignore[misc]
