"""How a connector's half starts, or what runs in its place."""

import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from kvplugin.integration.vllm.environment import is_disabled
from kvplugin.settings import read_settings

C = TypeVar("C", bound=msgspec.Struct)
T = TypeVar("T")


def start_half(
    name: str,
    kind: type[C],
    settings: Mapping[str, Any],
    start: Callable[[C], T],
    idle: Callable[[str], T],
) -> T:
    """`start` with the user's settings, or `idle` with the reason where the user wants
    that instead.

    Args:
        name: of the connector, for messages.
        kind: struct of its settings; `on_start_error` may be one.
        settings: what the user wrote.
        start: makes the half.
        idle: makes one that does nothing.

    Raises:
        ConfigError: a setting is wrong.
        Exception: whatever `start` raises, with `on_start_error` "fail".
    """
    if is_disabled():
        return idle("KVPLUGIN_DISABLE is set")
    where = "kv_connector_extra_config"
    config = read_settings(kind, settings, where)
    try:
        return start(config)
    except Exception as error:
        if getattr(config, "on_start_error", "fail") == "fail":
            raise
        logging.getLogger(f"vllm.kvplugin.{name}").error(
            "kvplugin %s is disabled, it did not start: %s", name, error
        )
        return idle(f"it did not start: {error}")
