"""Why a prefix hit was not longer, for those who ask.

manager = KVCacheManager(..., lookup_history=LookupHistory(capacity=100_000))
print(manager.explain_lookup(request))
"""

from kvplugin.explain.history import BlockIdentity, LookupHistory
from kvplugin.explain.lookup import explain_lookup
from kvplugin.explain.result import (
    GroupExplanation,
    LookupExplanation,
    Loss,
    LostHit,
)

__all__ = [
    "BlockIdentity",
    "GroupExplanation",
    "LookupExplanation",
    "LookupHistory",
    "Loss",
    "LostHit",
    "explain_lookup",
]
