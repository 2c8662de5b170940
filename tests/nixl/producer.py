"""An engine's producing side, for tests of what it hands over."""

from typing import Any

from kvplugin import Request
from kvplugin.connectors.metrics import Counters
from kvplugin.connectors.nixl.config import NixlConfig, Role
from kvplugin.connectors.nixl.handovers import Handovers
from kvplugin.connectors.nixl.leases import Leases
from kvplugin.connectors.nixl.metrics import METRICS
from kvplugin.connectors.nixl.wire import Granted, Open
from kvplugin.contract import EngineInfo, GroupInfo, GroupKind

TO_DECODER = {"do_remote_decode": True, "do_remote_prefill": False}
FROM_PREFILL = {"do_remote_decode": False, "do_remote_prefill": True}


def group(kind: GroupKind = GroupKind.FULL, **fields: Any) -> GroupInfo:
    return GroupInfo(
        **({"index": 0, "kind": kind, "block_size": 16, "layers": {}} | fields)
    )


def window(size: int, extra: int = 0, **fields: Any) -> GroupInfo:
    kind = GroupKind.SLIDING_WINDOW
    return group(kind, window=size, extra_history=extra, **fields)


def chunked(size: int) -> GroupInfo:
    return group(GroupKind.CHUNKED_LOCAL, window=size)


def states(**fields: Any) -> GroupInfo:
    return group(GroupKind.MAMBA, **fields)


class Producer:
    """An engine's producing side, with a clock of its own."""

    def __init__(
        self, *groups: GroupInfo, role: Role = Role.PRODUCER, **settings: Any
    ) -> None:
        self.now = 50.0
        numbered = tuple(
            GroupInfo(
                **{name: getattr(one, name) for name in one.__slots__} | {"index": i}
            )
            for i, one in enumerate(groups or (group(),))
        )
        engine = EngineInfo("engine-1", numbered, 1000, 16)
        self.counters = Counters(METRICS)
        self.leases = Leases(1000, lambda: self.now)
        self.handovers = Handovers(
            engine,
            NixlConfig(**settings),
            role,
            self.leases,
            self.counters,
            lambda: self.now,
        )

    def hand_over(
        self,
        *rows: list[int],
        tokens: int = 40,
        computed: int | None = None,
        params: Any = TO_DECODER,
        outputs: int = 1,
    ) -> Any:
        """What the client is told of a request with a prompt of `tokens`."""
        self.request = request(tokens, params, outputs)
        done = tokens + max(outputs - 1, 0) if computed is None else computed
        return self.handovers.handover(self.request, rows, done)

    def granted(self, told: Any) -> Granted:
        answer = self.leases.open(
            Open(peer_id="engine-1", lease=told["remote_request_id"], reader="r")
        )
        assert isinstance(answer, Granted)
        return answer

    def is_nothing(self, told: Any) -> bool:
        """Whether the client is told, in so many words, that there is nothing."""
        if told["do_remote_prefill"] or told["remote_block_ids"]:
            return False
        return not (len(self.leases) or self.handovers.finished(self.request))


def request(tokens: int = 40, params: Any = None, outputs: int = 0) -> Any:
    made = Request("req-1", list(range(tokens)), kv_transfer_params=params)
    made.append_output_token_ids([7] * outputs)
    return made
