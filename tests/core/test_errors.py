"""One tree of errors, and messages that say what to change."""

import inspect

import pytest

from kvplugin import errors
from kvplugin.errors import ConfigError, KVPluginError, TransferError, unknown_name

ERRORS = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, BaseException)
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda cls: cls.__name__)
def test_every_error_is_caught_as_ours(error: type[Exception]) -> None:
    assert issubclass(error, KVPluginError)


def test_wrong_setting_is_a_value_error_as_well() -> None:
    assert issubclass(ConfigError, ValueError)


def test_failed_transfer_is_retried_only_if_it_says_so() -> None:
    assert not TransferError("gone").retryable
    assert TransferError("busy", retryable=True).retryable
    assert str(TransferError("busy", retryable=True)) == "busy"


def test_unknown_name_says_the_value_the_key_and_the_names_that_exist() -> None:
    error = unknown_name("colour", "rad", ["red", "blue"], "paint.colour")
    assert isinstance(error, ConfigError)
    assert str(error) == (
        "unknown colour 'rad' in paint.colour. Did you mean 'red'? Known: blue, red."
    )


def test_unknown_name_guesses_nothing_far_away() -> None:
    message = str(unknown_name("colour", "seven", ["red", "blue"], "colour"))
    assert message == "unknown colour 'seven' in colour. Known: blue, red."
