"""`KVPluginScheduler`: vLLM's own scheduler with the policies of a configuration.

    --scheduler-cls kvplugin.integration.vllm.scheduler.KVPluginScheduler
    --additional-config '{"kvplugin": {"eviction_policy": "reuse"}}'

Decisions are vLLM's: `schedule` is never copied. Policies are asked before it, and
reach the block pool through subclasses that vLLM makes in place of its own. Beside a
KV connector the class also undoes failed synchronous loads (`protection`).
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvplugin.integration.vllm.environment import is_disabled
from kvplugin.integration.vllm.versions import (
    SCHEDULER_CLASS,
    log_missing,
    missing_for,
)

if TYPE_CHECKING:
    from kvplugin.integration.vllm.policies import Policies

_SCHED = "vllm.v1.core.sched"


class KVPluginScheduler:
    """The value of `--scheduler-cls`. What it makes is a subclass of the class that
    vLLM would have taken, or that class itself where `KVPLUGIN_DISABLE` is set or
    `on_start_error` says so."""

    def __new__(cls, vllm_config: Any, kv_cache_config: Any, **kwargs: Any) -> Any:
        """A scheduler.

        Args:
            vllm_config: vLLM's.
            kv_cache_config: vLLM's.
            kwargs: the other arguments of vLLM's schedulers, passed on.

        Raises:
            ConfigError: a setting is wrong; it names the key.
            PluginError: a plugin is unfit.
        """
        base = own_class(vllm_config)
        # vLLM 0.19 knows one block size.
        hash_block_size = kwargs.get("hash_block_size") or kwargs["block_size"]
        policies = _policies(vllm_config, kv_cache_config, hash_block_size)
        if policies is None:
            return base(vllm_config, kv_cache_config, **kwargs)
        if policies.config.protect_from_failed_loads and vllm_config.kv_transfer_config:
            base = _protected(base)
        return with_policies(base)(
            vllm_config, kv_cache_config, policies=policies, **kwargs
        )


def _policies(
    vllm_config: Any, kv_cache_config: Any, hash_block_size: int
) -> Policies | None:
    """None: this engine runs as vLLM would."""
    if is_disabled():
        return None
    if missing := missing_for(SCHEDULER_CLASS):
        log_missing(SCHEDULER_CLASS, missing)
        return None
    from kvplugin.integration.vllm.policies import start_policies

    return start_policies(vllm_config, kv_cache_config, hash_block_size)


def _protected(base: Any) -> Any:
    from kvplugin.integration.vllm.protection import with_protection

    return with_protection(base)


def own_class(vllm_config: Any) -> Any:
    """The class that vLLM takes where no scheduler is named."""
    is_async = vllm_config.scheduler_config.async_scheduling
    if getattr(vllm_config, "diffusion_config", None) is not None:
        name = "DiffusionAsyncScheduler" if is_async else "DiffusionScheduler"
        module = "diffusion_scheduler"
    else:
        name = "AsyncScheduler" if is_async else "Scheduler"
        module = "async_scheduler" if is_async else "scheduler"
    return getattr(import_module(f"{_SCHED}.{module}"), name)


@cache
def with_policies(base: Any) -> Any:
    """The subclass of a scheduler of vLLM's that takes `policies`."""

    class PolicyScheduler(base):
        """vLLM's scheduler, with policies asked before each step."""

        def __init__(self, *args: Any, policies: Policies, **kwargs: Any) -> None:
            with policies.bound():
                super().__init__(*args, **kwargs)
            self.kvp = policies.steer(self)

        def add_request(self, request: Any) -> None:
            self.kvp.arrives(request)
            super().add_request(request)

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            self.kvp.begin_step()
            return super().schedule(*args, **kwargs)

        def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
            self.kvp.ends(request)
            return super()._free_request(request, *args, **kwargs)

        def shutdown(self) -> None:
            self.kvp.close()
            super().shutdown()

    PolicyScheduler.__name__ = f"KVPlugin{base.__name__}"
    PolicyScheduler.__qualname__ = PolicyScheduler.__name__
    return PolicyScheduler
