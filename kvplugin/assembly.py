"""How a core is put together: every part comes from the hook that makes it."""

from collections.abc import Mapping
from dataclasses import replace

from kvplugin.block_pool import BlockPool
from kvplugin.coordinator import KVCacheCoordinator
from kvplugin.errors import ConfigError
from kvplugin.hooks import (
    BlockPoolContext,
    CoordinatorContext,
    EvictionPolicyContext,
    Hooks,
    ManagerContext,
)
from kvplugin.managers import ManagerSettings, SingleTypeKVCacheManager
from kvplugin.residency import ResidencySampler
from kvplugin.spec import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    UniformTypeKVCacheSpecs,
)


def make_pool(
    hooks: Hooks,
    config: KVCacheConfig,
    settings: ManagerSettings,
    *,
    eviction_policy: str,
    eviction_policy_options: Mapping[str, object],
    enable_events: bool,
    residency: ResidencySampler | None,
) -> BlockPool:
    """The pool of all groups, with its eviction policy.

    Raises:
        ConfigError: no such policy, or not with these options.
        PluginError: a plugin fails.
    """
    policy = hooks.make_eviction_policy(
        EvictionPolicyContext(
            name=eviction_policy,
            options=eviction_policy_options,
            num_blocks=config.num_blocks,
        )
    )
    return hooks.make_block_pool(
        BlockPoolContext(
            num_blocks=config.num_blocks,
            policy=policy,
            block_size=settings.hash_block_size or 0,
            enable_caching=settings.enable_caching,
            enable_events=enable_events,
            residency=residency,
            parity=settings.parity,
        )
    )


def make_coordinator(
    hooks: Hooks,
    config: KVCacheConfig,
    pool: BlockPool,
    settings: ManagerSettings,
    *,
    max_model_len: int,
    use_eagle: bool,
) -> KVCacheCoordinator:
    """The managers of all groups and what coordinates them.

    Raises:
        ConfigError: the groups cannot work as configured.
        PluginError: a plugin fails.
    """
    for group in config.kv_cache_groups:
        _refuse_split_state(group.kv_cache_spec, max_model_len)
    managers = [
        _make_manager(hooks, group.kv_cache_spec, pool, replace(settings, group=i))
        for i, group in enumerate(config.kv_cache_groups)
    ]
    return hooks.make_coordinator(
        CoordinatorContext(
            kv_cache_config=config,
            pool=pool,
            managers=managers,
            enable_caching=settings.enable_caching,
            use_eagle=use_eagle,
            parity=settings.parity,
        )
    )


def _refuse_split_state(spec: KVCacheSpec, max_model_len: int) -> None:
    if (
        isinstance(spec, MambaSpec)
        and spec.mamba_cache_mode == "none"
        and spec.block_size < max_model_len
    ):
        raise ConfigError(
            f"in mamba_cache_mode 'none' a request keeps one state: the block size of "
            f"its layers must be max_model_len={max_model_len}, not {spec.block_size}"
        )


def _make_manager(
    hooks: Hooks, spec: KVCacheSpec, pool: BlockPool, settings: ManagerSettings
) -> SingleTypeKVCacheManager:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        # Its layers differ in bytes only; any of them says which tokens are kept.
        spec = next(iter(spec.kv_cache_specs.values()))
    if settings.parity.zeroes_full_attention_only:
        settings = replace(settings, report_new_blocks=type(spec) is FullAttentionSpec)
    return hooks.make_manager(spec, ManagerContext(pool=pool, settings=settings))
