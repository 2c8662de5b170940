"""What a plugin imports: the marker of its implementations and the version."""

from typing import Final

import pluggy

PROJECT: Final = "kvplugin"
"""Name of the marker, of the plugin manager and of the entry-point group."""

HOOK_API_VERSION: Final = 1
"""Raised when a hook changes in a way that plugins notice. A plugin that declares
another one as its ``KVP_HOOK_API_VERSION`` is refused."""

hookimpl: Final = pluggy.HookimplMarker(PROJECT)
"""Marks an implementation of a hook in a plugin."""

hookspec: Final = pluggy.HookspecMarker(PROJECT)
"""Marks a specification; for `kvplugin.hooks.specs` only."""
