"""Sparing: of those that run one is safe, so that somebody always comes to an end."""

from collections.abc import Sequence

from kvplugin.request import RequestLike


def may_lose(candidates: Sequence[RequestLike]) -> Sequence[RequestLike]:
    """All but the one that arrived first, or the only one.

    Whoever a policy likes least arrives first some day, as those before it have ended:
    from then on it keeps what it computes, however many better ones come. Of those that
    arrived at the same time it is the one that was preempted most often, then the one
    admitted first.

    Args:
        candidates: in the order of their admission, one or more.
    """
    if len(candidates) == 1:
        return candidates
    safe = min(candidates, key=lambda r: (r.arrival_time, -r.num_preemptions))
    return [request for request in candidates if request is not safe]
