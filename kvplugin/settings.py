"""Settings that users write: one frozen struct for each place, unknown keys refused."""

from collections.abc import Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin

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
            wrong value (with those there are, where they are few).
    """
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    for key, value in settings.items():
        if key not in fields:
            raise unknown_name("key", str(key), list(fields), where)
        kind_of_value = fields[key].type
        if get_origin(kind_of_value) is Literal:
            _check_choice(f"{where}: {key}", value, get_args(kind_of_value))
    try:
        return msgspec.convert(settings, kind)
    except (msgspec.ValidationError, ConfigError) as error:
        raise ConfigError(f"{where}: {error}") from error


def _check_choice(what: str, value: Any, choices: tuple[Any, ...]) -> None:
    if value not in choices:
        known = " or ".join(repr(choice) for choice in choices)
        raise ConfigError(f"{what} is {repr(value)[:64]} and must be {known}")
