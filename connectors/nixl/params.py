"""``kv_transfer_params``: what a client says of a request, and is told of it.

The names and their meaning are those of vLLM's NixlConnector, so that routers written
for it work. Whatever a client sends is checked here, field by field, before anything
else looks at it; fields that nobody here knows are routers' own business.

    do_remote_decode                 hand over when it ends
    do_remote_prefill + remote_*     read what another engine handed over
    do_remote_decode + remote_*      read what the decoder of the turn before handed
                                     over, and hand over
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvplugin.connectors.nixl.address import Address
from kvplugin.connectors.nixl.param_fields import (
    ParamsError,
    flag,
    has_blocks,
    host,
    integer,
    missing,
    number,
    optional,
    printable,
    required,
    shown,
    wrong,
)
from kvplugin.contract import EngineInfo

PULL: Final = "pull"
"""The transfer mode that is served: the consumer reads."""
_MOST_TOKENS: Final = 1 << 40
_MOST_RANKS: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class ReadFrom:
    """What another engine has handed over."""

    address: str
    """Of its side channel: ``host:port``, an IPv6 host in brackets."""
    engine_id: str
    lease: str
    num_tokens: int
    """How many it said it holds; 0 if it did not."""
    from_decoder: bool
    """Of the turn before, for which `kv_recompute_threshold` is meant."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a client wants of a request."""

    read: ReadFrom | None = None
    """Instead of computing it."""
    hands_over: bool = False
    """Another engine goes on with it."""


NOTHING: Final = Wanted()


def parse(params: Any) -> Wanted:
    """What a request's ``kv_transfer_params`` ask for.

    Raises:
        ParamsError: a field is missing, not of its type or out of its range.
    """
    if params is None:
        return NOTHING
    if not isinstance(params, Mapping):
        raise ParamsError(f"kv_transfer_params={shown(params)} must be a table")
    reads, hands_over = flag(params, "do_remote_prefill"), wants_handover(params)
    if reads and hands_over:
        raise ParamsError(
            "do_remote_prefill and do_remote_decode are both true: the request cannot "
            "be prefilled elsewhere and here"
        )
    if not (reads or hands_over):
        return NOTHING
    _check_mode(params)
    offers = optional(params, "remote_block_ids", has_blocks)
    if offers is None and reads:
        raise missing("remote_block_ids")
    if not offers:
        return Wanted(hands_over=hands_over)
    return Wanted(_read_from(params, from_decoder=hands_over), hands_over)


def wants_handover(params: Mapping[str, Any]) -> bool:
    """Whether another engine is to go on with a request.

    Raises:
        ParamsError: who knows?
    """
    return flag(params, "do_remote_decode")


def _read_from(params: Mapping[str, Any], *, from_decoder: bool) -> ReadFrom:
    for name in ("tp_size", "pp_size", "dcp_size"):
        optional(params, name, integer(1, _MOST_RANKS))
    optional(params, "remote_blocks_expiry_time", number)
    return ReadFrom(
        address=str(
            Address(
                required(params, "remote_host", host),
                required(params, "remote_port", integer(1, 65_535)),
            )
        ),
        engine_id=required(params, "remote_engine_id", printable),
        lease=required(params, "remote_request_id", printable),
        num_tokens=optional(params, "remote_num_tokens", integer(0, _MOST_TOKENS)) or 0,
        from_decoder=from_decoder,
    )


def _check_mode(params: Mapping[str, Any]) -> None:
    mode = params.get("transfer_mode")
    if mode is not None and mode != PULL:
        raise wrong(
            "transfer_mode",
            mode,
            f"{PULL!r}: KVPluginNixlConnector reads from the other engine, nothing is "
            "pushed to it",
        )


# -- what a client is told -------------------------------------------------------------


def handover_params(
    engine: EngineInfo,
    address: Address,
    *,
    lease: str,
    rows: Sequence[Sequence[int]],
    num_tokens: int,
    to_decoder: bool,
    expires_at: float | None = None,
) -> dict[str, Any]:
    """Parameters of the request with which another engine goes on.

    Args:
        engine: this one.
        address: of its side channel.
        lease: under which the blocks can be read.
        rows: the blocks by group; for routers, readers are told them again.
        num_tokens: whose KV they hold.
        to_decoder: the other engine decodes; else it prefills the next turn.
        expires_at: when the lease runs out on this engine's monotonic clock.
    """
    return {
        **_about(engine),
        "do_remote_prefill": to_decoder,
        "do_remote_decode": not to_decoder,
        "remote_block_ids": [list(row) for row in rows],
        "remote_engine_id": engine.engine_id,
        "remote_request_id": lease,
        "remote_host": address.host,
        "remote_port": address.port,
        "remote_num_tokens": num_tokens,
        "remote_blocks_expiry_time": expires_at,
    }


def no_kv_params(engine: EngineInfo, *, to_decoder: bool) -> dict[str, Any]:
    """Parameters that say that there is nothing to read: whoever goes on computes.

    Args:
        engine: this one.
        to_decoder: as of `handover_params`.
    """
    return {
        **_about(engine),
        "do_remote_prefill": False,
        "do_remote_decode": not to_decoder,
        "remote_block_ids": [],
        "remote_engine_id": engine.engine_id,
        "remote_request_id": None,
        "remote_host": None,
        "remote_port": None,
        "remote_num_tokens": 0,
        "remote_blocks_expiry_time": None,
    }


def _about(engine: EngineInfo) -> dict[str, Any]:
    return {
        "tp_size": engine.tp_size,
        "pp_size": engine.world_size // engine.tp_size,
        "dcp_size": 1,
        "transfer_mode": PULL,
    }
