"""The start of policies in vLLM: what is wanted, what this vLLM has the names for."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from threading import RLock
from types import ModuleType
from typing import Any, Final

from vllm.v1.core import kv_cache_coordinator
from vllm.v1.core.sched import scheduler as vllm_scheduler

from kvplugin.errors import ConfigError, PluginError
from kvplugin.hooks import Hooks
from kvplugin.hooks.checks import bind_failure
from kvplugin.integration.vllm.policy_config import PolicyConfig, read_policy_config
from kvplugin.integration.vllm.policy_manager import policy_classes
from kvplugin.integration.vllm.recorder import Recorder
from kvplugin.integration.vllm.steering import Steering
from kvplugin.integration.vllm.versions import (
    EVICTION,
    VICTIM,
    WAITING,
    log_missing,
    missing_for,
    vllm_version,
)

logger = logging.getLogger("vllm.kvplugin.policies")

_VLLMS_OWN: Final = "lru"
"""The eviction policy that vLLM's own queue is: nothing is put in its place."""

_READ: Final = {
    WAITING: (
        "waiting",
        "running",
        "policy.value",
        "max_num_running_reqs",
        "kv_cache_manager.enable_caching",
        "kv_cache_manager.block_pool.num_gpu_blocks",
        "kv_cache_manager.block_pool.hash_block_size",
        "kv_cache_manager.coordinator.single_type_managers",
    ),
    VICTIM: (
        "running",
        "max_num_scheduled_tokens",
        "max_model_len",
        "num_lookahead_tokens",
        "kv_cache_manager.coordinator.single_type_managers",
    ),
}
"""Attributes of a scheduler that features read."""

_binding = RLock()


@dataclass(frozen=True)
class Policies:
    """What a scheduler is given while it is constructed."""

    config: PolicyConfig
    hooks: Hooks
    classes: tuple[type[Any], type[Any]] | None
    """Block pool and manager with the eviction policy; None: vLLM's own."""
    recorder: Recorder | None

    @contextmanager
    def bound(self) -> Iterator[None]:
        """Let vLLM make our pool and manager in place of its own."""
        if self.classes is None:
            yield
            return
        pool, manager = self.classes
        with (
            _binding,
            _bound(kv_cache_coordinator, "BlockPool", pool),
            _bound(vllm_scheduler, "KVCacheManager", manager),
        ):
            yield

    def steer(self, scheduler: Any) -> Steering:
        """What runs beside `scheduler` from now on."""
        hooks = self.hooks
        pool = scheduler.kv_cache_manager.block_pool
        ranking = None
        if self.classes is not None:
            ranking = getattr(pool, "kvp", None)
            if ranking is None:
                log_missing(EVICTION, f"the block pool is a {type(pool).__name__}")
        demand = ranking is not None and ranking.wants_demand
        turns = hooks.orders_waiting or hooks.chooses_admission or demand
        steering = Steering(
            scheduler,
            hooks,
            ranking=ranking,
            recorder=self.recorder,
            turns=turns and _serves(WAITING, scheduler),
            victims=hooks.chooses_victim and _serves(VICTIM, scheduler),
        )
        self._log(scheduler)
        return steering

    def _log(self, scheduler: Any) -> None:
        hooks, config = self.hooks, self.config
        decides = {
            "eviction": (self.classes is not None, config.eviction_policy),
            "waiting order": (hooks.orders_waiting, config.waiting_order),
            "admission": (hooks.chooses_admission, config.admission),
            "victim": (hooks.chooses_victim, config.victim),
            "trace": (self.recorder is not None, config.record_trace),
        }
        active = [f"{what} {name}" for what, (is_on, name) in decides.items() if is_on]
        logger.info(
            "kvplugin policies on %s of vLLM %s: %s",
            type(scheduler).__name__,
            vllm_version(),
            ", ".join(active) or "none, all is vLLM's own",
        )


def start_policies(
    vllm_config: Any, kv_cache_config: Any, hash_block_size: int
) -> Policies | None:
    """Policies for the scheduler of this configuration; None: run it as vLLM would.

    Args:
        vllm_config: vLLM's.
        kv_cache_config: vLLM's.
        hash_block_size: tokens that a hash of a request covers.

    Raises:
        ConfigError: a setting is wrong; it names the key.
        PluginError: a plugin is unfit.
    """
    config = read_policy_config(vllm_config.additional_config)
    try:
        return _start(config, vllm_config, kv_cache_config, hash_block_size)
    except ConfigError:
        raise
    except Exception as error:
        if config.on_start_error == "fail":
            raise
        logger.error("kvplugin policies are off, they did not start: %s", error)
        return None


def _start(
    config: PolicyConfig, vllm_config: Any, kv_cache_config: Any, hash_block_size: int
) -> Policies:
    hooks = config.hooks()
    if hooks.chooses_victim and vllm_config.scheduler_config.policy == "priority":
        _refuse_victim(config)
    return Policies(
        config,
        hooks,
        classes=_classes(config, hooks, vllm_config, kv_cache_config.num_blocks),
        recorder=_recorder(config, vllm_config, kv_cache_config, hash_block_size),
    )


def _classes(
    config: PolicyConfig, hooks: Hooks, vllm_config: Any, num_blocks: int
) -> tuple[type[Any], type[Any]] | None:
    name = config.eviction_policy
    if name == _VLLMS_OWN:
        return None
    if not vllm_config.cache_config.enable_prefix_caching:
        logger.warning(
            "eviction_policy=%r does nothing: prefix caching is off in this engine",
            name,
        )
        return None
    if missing := missing_for(EVICTION):
        log_missing(EVICTION, missing)
        return None
    _try_out(config, hooks, num_blocks)
    return policy_classes(
        kv_cache_coordinator.BlockPool,
        vllm_scheduler.KVCacheManager,
        partial(config.make_eviction_policy, hooks),
    )


def _refuse_victim(config: PolicyConfig) -> None:
    why = "under vLLM's scheduling_policy 'priority' the victim is the request of the "
    why += "lowest priority"
    if config.victim == "last":
        raise ConfigError(
            f"an installed plugin chooses victims (`kvplugin plugins` shows which); "
            f"{why}: use 'fcfs', or leave that plugin out of KVPLUGIN_PLUGINS"
        )
    raise ConfigError(f"victim={config.victim!r}: {why}, use 'fcfs' or leave it out")


def _try_out(config: PolicyConfig, hooks: Hooks, num_blocks: int) -> None:
    """Make and bind a policy, so that one that fails does so here and not while vLLM
    builds its pool."""
    policy = config.make_eviction_policy(hooks, num_blocks)
    error = bind_failure(policy, num_blocks)
    if error is not None:
        raise PluginError(
            f"eviction_policy={config.eviction_policy!r}: {type(policy).__name__}.bind "
            f"fails: {type(error).__name__}: {error}"
        ) from error


def _recorder(
    config: PolicyConfig, vllm_config: Any, kv_cache_config: Any, hash_block_size: int
) -> Recorder | None:
    if config.record_trace is None:
        return None
    parallel = vllm_config.parallel_config
    path = config.record_trace
    if getattr(parallel, "data_parallel_size", 1) > 1:
        path = f"{path}.{parallel.data_parallel_index}"
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return Recorder(path, hash_block_size, [type(spec).__name__ for spec in specs])


def _serves(feature: str, scheduler: Any) -> bool:
    """Whether this vLLM has what a feature needs that is wanted."""
    missing = missing_for(feature)
    for path in _READ[feature]:
        try:
            attrgetter(path)(scheduler)
        except AttributeError as error:
            missing = missing or str(error)
    if missing:
        log_missing(feature, missing)
    return not missing


@contextmanager
def _bound(module: ModuleType, name: str, value: object) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)
