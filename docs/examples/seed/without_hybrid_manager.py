"""Without the hybrid manager windows compute as before, and cost what full ones do."""

from tiny import FULL, make_model, window

from kvplugin import GroupingConfig, get_capacity, get_kv_cache_configs
from kvplugin.worker.collect import collect_layers

layers = make_model(*[FULL, window(32), window(32)] * 10).rank().mixers
specs = collect_layers(layers).specs
for disabled in (False, True):
    limits = GroupingConfig(
        max_model_len=1024,
        max_num_batched_tokens=64,
        disable_hybrid_kv_cache_manager=disabled,
    )
    resolved = get_kv_cache_configs([specs], limits, [64 << 20])
    (worker,) = resolved.configs
    print(
        "disabled:" if disabled else "enabled:", len(worker.kv_cache_groups), "groups"
    )
    print("  " + get_capacity(worker, resolved.config).lines()[1])
