"""Specs, groups, configurations and memory checks of vLLM's own core.

A request is a list of `tests.core.grouping_cases.Case`; an answer has one dictionary a
case. A failure is answered as ``("error", type name, message)``.
"""

from dataclasses import fields
from types import SimpleNamespace


def answer(cases):
    import vllm

    old = vllm.__version__.startswith("0.19.")
    return [_answer_019(case) if old else _answer_032(case) for case in cases]


def _answer_019(case):
    from vllm.v1.core import kv_cache_utils as utils

    config = _config(case)
    specs = _specs(case)
    workers = [{name: specs[name] for name in names} for names in case.workers]
    found = _per_layer(specs, config)
    found["groups"] = _try(
        lambda: _groups(utils.get_kv_cache_groups(config, dict(specs)))
    )
    found["estimate"] = _try(
        lambda: utils._estimate_max_model_len_from_groups(
            config,
            utils.get_kv_cache_groups(config, dict(specs)),
            case.available[0],
        )
    )
    found["configs"] = _try(lambda: _configs(utils, config, workers, case.available))
    found["max_model_len"] = config.model_config.max_model_len
    return found


def _configs(utils, config, workers, available):
    configs = utils.get_kv_cache_configs(config, workers, list(available))
    return [
        {
            "num_blocks": each.num_blocks,
            "tensors": [(t.size, tuple(t.shared_by)) for t in each.kv_cache_tensors],
            "groups": _groups(each.kv_cache_groups),
            "concurrency": utils.get_max_concurrency_for_kv_cache_config(config, each),
        }
        for each in configs
    ]


def _answer_032(case):
    from vllm.v1.core import kv_cache_utils as utils

    specs = _specs(case)
    found = _per_layer(specs, _config(case))
    found["uniform"] = utils.is_kv_cache_spec_uniform(specs)
    found["unified"] = _try(
        lambda: {
            name: _spec(spec)
            for name, spec in utils.unify_kv_cache_spec_page_size(specs).items()
        }
    )
    found["split"] = _try(
        lambda: _groups(
            utils._get_kv_cache_groups_uniform_page_size(
                utils.unify_kv_cache_spec_page_size(specs)
            )
        )
    )
    return found


def _config(case):
    limits = case.limits
    return SimpleNamespace(
        model_config=SimpleNamespace(
            max_model_len=limits["max_model_len"],
            original_max_model_len=-1 if case.auto_fit else limits["max_model_len"],
        ),
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=limits["max_num_batched_tokens"],
            max_num_encoder_input_tokens=limits["max_num_encoder_input_tokens"],
            disable_hybrid_kv_cache_manager=case.disable_hybrid,
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=limits["decode_context_parallel_size"],
            prefill_context_parallel_size=limits["prefill_context_parallel_size"],
        ),
        cache_config=SimpleNamespace(
            mamba_cache_mode=limits["mamba_cache_mode"],
            num_gpu_blocks_override=case.override,
        ),
        max_in_flight_tokens=limits["max_num_batched_tokens"],
    )


def _specs(case):
    import torch
    from vllm.v1 import kv_cache_interface as kinds

    specs = {}
    for name, (kind, given) in case.layers.items():
        values = dict(given)
        if "dtype" in values:
            values["dtype"] = getattr(torch, values["dtype"])
        if "dtypes" in values:
            values["dtypes"] = tuple(getattr(torch, d) for d in values["dtypes"])
        specs[name] = getattr(kinds, kind)(**values)
    return specs


def _per_layer(specs, config):
    return {
        "pages": {name: spec.page_size_bytes for name, spec in specs.items()},
        "memory": {
            name: _try(lambda spec=spec: spec.max_memory_usage_bytes(config))
            for name, spec in specs.items()
        },
    }


def _groups(groups):
    return [(tuple(g.layer_names), _spec(g.kv_cache_spec)) for g in groups]


def _spec(spec):
    found = {field.name: getattr(spec, field.name) for field in fields(spec)}
    if "kv_cache_specs" in found:
        inner = found["kv_cache_specs"]
        found["kv_cache_specs"] = {name: _spec(inner[name]) for name in inner}
    for name in ("dtype", "dtypes"):
        if name in found:
            found[name] = str(found[name]).replace("torch.", "").replace("'", "")
    plain = (int, str, tuple, dict, type(None))
    found = {name: value for name, value in found.items() if isinstance(value, plain)}
    return (type(spec).__name__, found)


def _try(work):
    try:
        return work()
    except Exception as error:
        return ("error", type(error).__name__, str(error))
