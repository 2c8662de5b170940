"""Which requests are handed over to another engine, and what of them."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from kvplugin.connectors.metrics import Counters
from kvplugin.connectors.nixl.address import Address
from kvplugin.connectors.nixl.config import NixlConfig, Role
from kvplugin.connectors.nixl.leases import EndedLeases, Leases
from kvplugin.connectors.nixl.param_fields import ParamsError
from kvplugin.connectors.nixl.params import (
    handover_params,
    no_kv_params,
    wants_handover,
)
from kvplugin.connectors.nixl.prompt import token_digests
from kvplugin.connectors.nixl.tails import Held, Tail
from kvplugin.contract import EngineInfo, GroupKind, PeerRequestView, RequestView

logger = logging.getLogger("vllm.kvplugin.nixl")

_MOST_FOR_TURNS: Final = 0.5
"""Of the pool's blocks, as far as they wait for turns that may never come: who decodes
here needs the rest meanwhile."""


class Handovers:
    """The producing side of an engine's scheduler half.

    A request whose client says ``do_remote_decode`` goes to a decoder: its blocks stay
    for `kv_lease_duration`. With `bidirectional_kv_xfer`, one that this engine decoded
    goes back to a prefill of the next turn, for which its blocks stay
    `decoder_kv_blocks_ttl`; so does whatever a consumer keeps, which has nobody else to
    keep it for. All that wait so long share half of the pool, whatever clients say.

    Args:
        engine: the engine.
        config: the connector's configuration.
        role: the engine's.
        leases: where what is handed over is kept.
        counters: of the connector.
        clock: monotonic seconds, that of `leases`.

    Raises:
        ConfigError: the model has KV that cannot be handed over; says which.
    """

    def __init__(
        self,
        engine: EngineInfo,
        config: NixlConfig,
        role: Role,
        leases: Leases,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._config = config
        self._role = role
        self._leases = leases
        self._counters = counters
        self._clock = clock
        self._tails = [Tail.of(group) for group in engine.groups]
        self._goes_both_ways = config.bidirectional_kv_xfer
        self._most_for_turns = int(engine.num_blocks * _MOST_FOR_TURNS)
        self._has_states = any(g.kind is GroupKind.MAMBA for g in engine.groups)
        self._address = Address(
            config.advertise_host or config.side_channel_host,
            config.side_channel_port,
        )

    @property
    def serves(self) -> bool:
        """Whether other engines may read from this one."""
        return self._role is not Role.CONSUMER or self._goes_both_ways

    def leave_away(self, request: PeerRequestView) -> int:
        """Tokens at the end of the prompt that this engine is not to compute.

        One where a recurrent state is to be handed over: who goes on computes the last
        token itself and needs the state before it (as vLLM's NixlConnector). None of a
        request that reads no prefix cache, such as for log-probabilities of its
        prompt: who goes on would compute all of it.
        """
        if not (self._has_states and self.serves and _to_decoder(request)):
            return 0
        if getattr(request, "skip_reading_prefix_cache", False):
            return 0
        return 1 if request.num_prompt_tokens > 1 else 0

    def handover(
        self,
        request: PeerRequestView,
        block_ids: tuple[Sequence[int], ...],
        num_computed_tokens: int,
    ) -> dict[str, Any] | None:
        """A request has ended as it should: let others read its blocks.

        Returns:
            What its client is told: where they are, or, if the request has lost them,
            that there are none; None for a request that stays here.
        """
        to_decoder = _to_decoder(request)
        if not (to_decoder or self._goes_back(request)):
            return None
        waits = self._waits_for_turn(to_decoder)
        offer = self._offer(request, block_ids, num_computed_tokens, waits)
        if isinstance(offer, str):
            logger.log(
                logging.INFO if waits else logging.WARNING,
                "request %.128r has no KV to hand over: %s",
                request.request_id,
                offer,
            )
            self._counters.add("empty_handovers")
            return no_kv_params(self._engine, to_decoder=to_decoder)
        config = self._config
        seconds = config.decoder_kv_blocks_ttl if waits else config.kv_lease_duration
        lease = self._leases.add(
            request.request_id, offer.rows, offer.num_tokens, offer.digests, seconds
        )
        self._counters.add("handovers")
        self._update_gauges()
        return handover_params(
            self._engine,
            self._address,
            lease=lease,
            rows=offer.rows,
            num_tokens=offer.num_tokens,
            to_decoder=to_decoder,
            # As vLLM's: a prefill's lease is renewed, so says no time.
            expires_at=None if to_decoder else self._clock() + seconds,
        )

    def finished(self, request: RequestView) -> bool:
        """Whether the engine has to keep the request's blocks until `collect` names
        it."""
        return self._leases.holds(request.request_id)

    def collect(self) -> EndedLeases:
        """Leases that have ended since the last call, counted."""
        ended = self._leases.ended()
        if ended.request_ids:
            expired = len(ended.expired)
            self._counters.add("closed_leases", len(ended.closed))
            self._counters.add("expired_leases", expired)
            self._counters.add("revoked_leases", len(ended.revoked))
            self._update_gauges()
            if expired:
                # Not every conversation has a next turn.
                level = logging.INFO if self._goes_both_ways else logging.WARNING
                logger.log(
                    level,
                    "%d leases ran out, of request %.128r first: nobody has read them, "
                    "or who did has gone. Their blocks are free again",
                    expired,
                    ended.expired[0],
                )
        return ended

    # -- inside --------------------------------------------------------------------

    def _goes_back(self, request: PeerRequestView) -> bool:
        """Whether it came from a prefill, and its next turn may read from here."""
        if self._role is Role.PRODUCER or not self._goes_both_ways:
            return False
        params = request.kv_transfer_params
        return isinstance(params, Mapping) and "do_remote_prefill" in params

    def _waits_for_turn(self, to_decoder: bool) -> bool:
        """Whether the next turn reads it, for which a client takes its time."""
        is_kept = self._role is Role.CONSUMER or not to_decoder
        return self._goes_both_ways and is_kept

    def _offer(
        self,
        request: PeerRequestView,
        block_ids: Sequence[Sequence[int]],
        num_computed_tokens: int,
        waits: bool,
    ) -> "_Offer | str":
        """What others may read, or why there is nothing."""
        if not self.serves:
            return "this engine is a consumer, without bidirectional_kv_xfer"
        tokens = min(num_computed_tokens, _settled(request))
        if tokens < 1:
            return "none of its tokens is computed (preempted?)"
        if self._has_states and tokens < num_computed_tokens:
            return "a step under way changes its state"
        rows = []
        for rule in self._tails:
            group = rule.group
            row = block_ids[group.index] if group.index < len(block_ids) else ()
            tail = rule.cut(Held(row, tokens, request.num_prompt_tokens))
            if tail is None:
                return f"a block of group {group.index} ({group.kind}) is not there"
            rows.append(tail)
        blocks = sum(map(len, rows))
        if not any(map(any, rows)):
            return "none of its blocks is needed after its last token"
        has_room = self._leases.num_blocks + blocks <= self._most_for_turns
        if waits and not has_room:
            return (
                f"{self._leases.num_blocks} blocks wait for next turns already: a "
                "shorter decoder_kv_blocks_ttl keeps fewer"
            )
        try:
            return _Offer(rows, tokens, token_digests(request, tokens))
        except OverflowError as error:
            return f"one of its token ids is none: {error}"

    def _update_gauges(self) -> None:
        self._counters.set("leases", len(self._leases))
        self._counters.set("leased_blocks", self._leases.num_blocks)


class _Offer(NamedTuple):
    rows: list[list[int]]
    num_tokens: int
    digests: list[bytes]


def _settled(request: PeerRequestView) -> int:
    """Tokens whose KV no step under way computes: the last generated one has none
    yet, and beyond it there are drafts only."""
    has_output = request.num_tokens > request.num_prompt_tokens
    return request.num_tokens - has_output


def _to_decoder(request: PeerRequestView) -> bool:
    params = request.kv_transfer_params
    try:
        return isinstance(params, Mapping) and wants_handover(params)
    except ParamsError:
        return False
