"""Environment variables that the vLLM integration obeys."""

import os


def is_disabled() -> bool:
    """Whether `KVPLUGIN_DISABLE` makes every entry point inert."""
    return os.environ.get("KVPLUGIN_DISABLE", "").lower() in ("1", "true", "yes", "on")
