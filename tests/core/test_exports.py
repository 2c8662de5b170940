"""The names of the core are exported from the package, and imported when asked for."""

import importlib
import subprocess
import sys

import pytest

import kvplugin
from kvplugin import _EXPORTS

EXPORTS = [(module, name) for module, names in _EXPORTS.items() for name in names]


@pytest.mark.parametrize(("module", "name"), EXPORTS)
def test_an_export_is_what_its_module_calls_so(module: str, name: str) -> None:
    assert getattr(kvplugin, name) is getattr(importlib.import_module(module), name)
    assert name in dir(kvplugin)


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'KVCacheManger'"):
        kvplugin.KVCacheManger  # noqa: B018


def test_importing_the_package_imports_nothing_else() -> None:
    code = (
        "import sys, kvplugin; loaded = {m for m in sys.modules if 'kvplugin.' in m};"
        "assert not loaded & {'kvplugin.manager', 'kvplugin.hooks'}, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
