"""Settings for vLLM, validated before any engine starts."""

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

import msgspec

from kvplugin.connectors.nixl.address import check_exposure
from kvplugin.connectors.nixl.config import NixlConfig, Role
from kvplugin.connectors.offload.config import OffloadConfig
from kvplugin.errors import ConfigError, unknown_name
from kvplugin.integration.vllm.policy_config import (
    KEY,
    SCHEDULER_CLASS,
    read_policy_config,
)
from kvplugin.settings import read_settings

_UNITS: Final = {
    prefix + binary: base**power
    for power, prefix in enumerate("kmgt", start=1)
    for binary, base in (("", 1000), ("i", 1024))
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
    read_settings(OffloadConfig, settings, "kv_connector_extra_config")
    return {
        "kv_connector": "KVPluginOffloadConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": failure_policy,
        "kv_connector_extra_config": dict(settings),
    }


def nixl_transfer_config(
    role: str,
    settings: Mapping[str, Any],
    failure_policy: Literal["recompute", "fail"] = "recompute",
) -> dict[str, Any]:
    """The value of vLLM's `--kv-transfer-config` for `KVPluginNixlConnector`.

    Args:
        role: one of `kvplugin.connectors.nixl.config.Role`.
        settings: keys of `NixlConfig`.
        failure_policy: what vLLM does with a request whose read failed.

    Raises:
        ConfigError: an unknown key or a wrong value, or a side channel that would tell
            strangers too much.
    """
    config = read_settings(NixlConfig, settings, "kv_connector_extra_config")
    check_exposure(config)
    return {
        "kv_connector": "KVPluginNixlConnector",
        "kv_role": f"kv_{find_role(role)}",
        "kv_load_failure_policy": failure_policy,
        "kv_connector_extra_config": dict(settings),
    }


def find_role(name: str) -> Role:
    """A role by its name, with vLLM's ``kv_`` before it or without.

    Raises:
        ConfigError: there is none.
    """
    try:
        return Role(name.removeprefix("kv_"))
    except ValueError:
        raise unknown_name("role", name, [*Role], "kv_role") from None


def policy_arguments(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of vLLM's engine that make `KVPluginScheduler` decide.

    Args:
        settings: keys of `PolicyConfig`.

    Raises:
        ConfigError: an unknown key or a wrong value.
    """
    additional = {KEY: dict(settings)}
    read_policy_config(additional)
    return {"scheduler_cls": SCHEDULER_CLASS, "additional_config": additional}


def command_line(arguments: Mapping[str, Any]) -> str:
    """Arguments of vLLM's engine as options for a shell."""
    words = []
    for name, value in arguments.items():
        text = value if isinstance(value, str) else json.dumps(value)
        words += [f"--{name.replace('_', '-')}", shlex.quote(text)]
    return " ".join(words)


def parse_settings(texts: Iterable[str]) -> dict[str, Any]:
    """Settings that a user types as ``key=value``.

    Raises:
        ConfigError: there is no ``=`` in one, or a key comes twice.
    """
    settings: dict[str, Any] = {}
    for key, value in map(_parse_setting, texts):
        if key in settings:
            raise ConfigError(f"{key} is set twice")
        settings[key] = value
    return settings


def _parse_setting(text: str) -> tuple[str, Any]:
    """The value is JSON, a size or a word."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"{text!r} is not of the form key=value")
    return key.strip(), _parse_value(value.strip())


def _parse_value(text: str) -> Any:
    if size := re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)b?", text.lower()):
        return int(float(size[1]) * _UNITS[size[2]])
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
