"""What a scheduler half says, for tests of worker halves alone."""

from collections.abc import Iterable, Sequence

from kvplugin.connectors.identity import StoreIdentity
from kvplugin.connectors.offload.messages import (
    VERSION,
    BlockPairs,
    CopyOrder,
    HostPool,
    Plan,
)
from kvplugin.contract import EngineInfo
from kvplugin.wire import encode


def order(
    job: int,
    engine_ids: Sequence[int],
    host_ids: Sequence[int],
    group: int = 0,
    refusal: str = "",
) -> CopyOrder:
    """For request ``r<job>``: blocks of one group."""
    pairs = BlockPairs(group, list(engine_ids), list(host_ids))
    return CopyOrder(job, f"r{job}", [pairs], refusal)


def plan(
    engine: EngineInfo,
    step: int,
    pools: Sequence[HostPool],
    *,
    loads: Iterable[CopyOrder] = (),
    stores: Iterable[CopyOrder] = (),
    sends: Iterable[str] = (),
    given_up: Iterable[int] = (),
    identity: str = "",
) -> bytes:
    """A plan; of the engine's own identity unless another is given."""
    return encode(
        Plan(
            VERSION,
            step,
            identity or StoreIdentity.of(engine).shared,
            list(pools),
            list(loads),
            list(stores),
            list(sends),
            list(given_up),
        )
    )
