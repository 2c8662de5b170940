"""Settings that users write: one frozen struct for each place, unknown keys refused."""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from kvplugin.errors import ConfigError, unknown_name

T = TypeVar("T", bound=msgspec.Struct)


def read_settings(kind: type[T], settings: Mapping[str, Any], where: str) -> T:
    """Validate what the user wrote.

    Args:
        kind: the configuration struct.
        settings: the user's keys and values.
        where: the setting that holds them, for messages.

    Raises:
        ConfigError: an unknown key (with the nearest known one), a missing key or a
            wrong value.
    """
    known = [field.encode_name for field in msgspec.structs.fields(kind)]
    for key in settings:
        if key not in known:
            raise unknown_name("key", str(key), known, where)
    try:
        return msgspec.convert(settings, kind)
    except (msgspec.ValidationError, ConfigError) as error:
        raise ConfigError(f"{where}: {error}") from error
