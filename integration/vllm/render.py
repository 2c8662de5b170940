"""Settings for vLLM, validated before any engine starts."""

import re
from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from kvplugin.connectors.config import parse_config
from kvplugin.connectors.offload.config import OffloadConfig
from kvplugin.errors import ConfigError

_UNITS: Final = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12} | {
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}


def offload_transfer_config(
    settings: Mapping[str, Any],
    failure_policy: Literal["recompute", "fail"] = "recompute",
) -> dict[str, Any]:
    """The value of vLLM's `--kv-transfer-config` for `KVPluginOffloadConnector`.

    Args:
        settings: keys of `OffloadConfig`.
        failure_policy: what vLLM does with a request whose load failed.

    Raises:
        ConfigError: an unknown key or a wrong value.
    """
    parse_config(OffloadConfig, settings, "kv_connector_extra_config")
    return {
        "kv_connector": "KVPluginOffloadConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": failure_policy,
        "kv_connector_extra_config": dict(settings),
    }


def parse_setting(text: str) -> tuple[str, Any]:
    """``key=value`` as a user types it; the value is JSON, a size or a word.

    Raises:
        ConfigError: there is no ``=`` in it.
    """
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"{text!r} is not of the form key=value")
    return key.strip(), _parse_value(value.strip())


def _parse_value(text: str) -> Any:
    if size := re.fullmatch(r"([\d.]+)\s*([KMGT]i?)B?", text):
        try:
            return int(float(size[1]) * _UNITS[size[2]])
        except ValueError as error:
            raise ConfigError(f"{text!r} is not a size such as 8GiB") from error
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
