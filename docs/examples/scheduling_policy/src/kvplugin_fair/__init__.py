"""The plugin: an object with three hooks.

It remembers who was served. A process with several schedulers should give each its own
one, by `hooks_with(FairShare())`.
"""

from kvplugin_fair.policy import FairShare

__all__ = ["FairShare", "plugin"]

plugin = FairShare()
