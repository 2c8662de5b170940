"""What kvplugin does around the steps of a vLLM scheduler."""

import time
from typing import Any, Final

from kvplugin.demand import Change, Demand
from kvplugin.hooks import Hooks
from kvplugin.integration.vllm.recorder import Recorder
from kvplugin.integration.vllm.request_hints import HintReader
from kvplugin.integration.vllm.turns import Turns
from kvplugin.integration.vllm.victim import VictimChooser
from kvplugin.integration.vllm.wanted_keys import WantedKeys

_NO_CHANGE: Final = Change([], {})


class Steering:
    """The parts that a scheduler's configuration calls for; others cost nothing.

    Args:
        scheduler: vLLM's, complete.
        hooks: are asked for order, admission and victim.
        ranking: the pool's side of the eviction policy; None: the pool is vLLM's own.
        recorder: writes a trace.
        turns: whether the waiting queue becomes ours.
        victims: whether victims are chosen before a step.
    """

    def __init__(
        self,
        scheduler: Any,
        hooks: Hooks,
        *,
        ranking: Any = None,
        recorder: Recorder | None = None,
        turns: bool = False,
        victims: bool = False,
    ) -> None:
        self._scheduler = scheduler
        self._recorder = recorder
        self._hints = HintReader()
        self._ranking = ranking if ranking is not None and ranking.wants_steps else None
        self._demand: Demand | None = None
        self._turns: Turns | None = None
        self._victims = VictimChooser(scheduler, hooks) if victims else None
        if turns:
            if self._ranking is not None and self._ranking.wants_demand:
                self._demand = Demand(WantedKeys(scheduler.kv_cache_manager))
            self._turns = Turns(scheduler, hooks, self._demand or Nobody())

    def arrives(self, request: Any) -> None:
        """Before a request is added."""
        now = time.monotonic()
        self._hints.read(request, now)
        if self._recorder and request.request_id not in self._scheduler.requests:
            self._recorder.arrives(request, now)

    def begin_step(self) -> None:
        """Before a step is scheduled."""
        if self._turns is not None:
            self._turns.begin_step()
        if self._ranking is not None:
            change = self._demand.take() if self._demand else _NO_CHANGE
            self._ranking.step(time.monotonic(), *change)
        if self._victims is not None:
            self._victims.prepare()

    def ends(self, request: Any) -> None:
        """Before a request that ended is forgotten."""
        if self._recorder is not None:
            self._recorder.ends(request)

    def close(self) -> None:
        """The engine stops."""
        if self._recorder is not None:
            self._recorder.close()


class Nobody:
    """Wants to hear of no request; implements `waiting.Listener`."""

    def add(self, request: Any) -> None:
        pass

    def remove(self, request: Any) -> None:
        pass
