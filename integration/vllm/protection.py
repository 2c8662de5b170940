"""Undoing failed synchronous loads of any connector in vLLM's scheduler.

A synchronous load is trusted before it happened: its blocks have hashes, and later
requests share them, from the step that loads them. vLLM (0.19 to 0.32) answers a
failure by letting the first owner write its blocks again in place, and nobody else
hears of it. Here everything that was computed from a bad block is undone: hashes go,
requests are preempted and computed again, and what steps under way say of them is
dropped.
"""

from contextlib import nullcontext
from functools import cache
from operator import attrgetter
from typing import Any, Final

from kvplugin.integration.vllm.load_protection import LoadProtection
from kvplugin.integration.vllm.versions import FAILED_LOADS, log_missing, missing_for

_READ: Final = (
    "connector",
    "requests",
    "running",
    "prev_step_scheduled_req_ids",
    "failed_recving_kv_req_ids",
    "recompute_kv_load_failures",
    "kv_cache_manager.block_pool.blocks",
    "kv_cache_manager.block_pool.null_block.block_id",
    "kv_cache_manager.coordinator.single_type_managers",
)
"""Attributes of a scheduler that are read."""


_AS_USUAL: Final = nullcontext()


def with_protection(base: Any) -> Any:
    """The subclass of a scheduler of vLLM's that undoes failed synchronous loads, or
    `base` where this vLLM has not the names for it."""
    if missing := missing_for(FAILED_LOADS):
        log_missing(FAILED_LOADS, missing)
        return base
    return _subclass(base)


@cache
def _subclass(base: Any) -> Any:
    class ProtectedScheduler(base):
        """vLLM's scheduler, told by `_handle_invalid_blocks` of a failed load."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.kvp_loads = protection_of(self)

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            loads = self.kvp_loads
            if loads is None:
                return super().schedule(*args, **kwargs)
            with loads.connector_unasked() if loads.unasked else _AS_USUAL:
                output = super().schedule(*args, **kwargs)
            loads.begins(output)
            return output

        def _build_kv_connector_meta(
            self, connector: Any, scheduler_output: Any
        ) -> Any:
            if self.kvp_loads is not None:
                self.kvp_loads.announce(scheduler_output)
            return super()._build_kv_connector_meta(connector, scheduler_output)

        def update_from_output(
            self, scheduler_output: Any, model_runner_output: Any
        ) -> Any:
            loads = self.kvp_loads
            if loads is None:
                return super().update_from_output(scheduler_output, model_runner_output)
            output = loads.returns(scheduler_output)
            answer = super().update_from_output(output, model_runner_output)
            loads.ends()
            return answer

        def _handle_invalid_blocks(
            self, invalid_block_ids: set[int], num_scheduled_tokens: dict[str, int]
        ) -> Any:
            left, void = invalid_block_ids, set[str]()
            if self.kvp_loads is not None:
                void, left = self.kvp_loads.undo(invalid_block_ids)
            if left:
                void |= super()._handle_invalid_blocks(left, num_scheduled_tokens)
            return void

    ProtectedScheduler.__name__ = f"Protected{base.__name__}"
    ProtectedScheduler.__qualname__ = ProtectedScheduler.__name__
    return ProtectedScheduler


def protection_of(scheduler: Any) -> LoadProtection | None:
    """What undoes failed loads of `scheduler`; None where it has no connector, or is
    not as expected."""
    for path in _READ:
        try:
            attrgetter(path)(scheduler)
        except AttributeError as error:
            log_missing(FAILED_LOADS, str(error))
            return None
    if scheduler.connector is None:
        return None
    return LoadProtection(scheduler)
