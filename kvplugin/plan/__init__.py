"""What a model's KV cache costs: layers -> groups -> bytes, concurrency, waste."""

from kvplugin.plan.arithmetic import (
    CachePlan,
    longest_model_len,
    plan_model,
    plan_specs,
)
from kvplugin.plan.models import (
    CacheOptions,
    LayerKind,
    ModelShape,
    layers_of,
    load_model,
    load_models,
)
from kvplugin.plan.states import state_shapes

__all__ = [
    "CacheOptions",
    "CachePlan",
    "LayerKind",
    "ModelShape",
    "layers_of",
    "load_model",
    "load_models",
    "longest_model_len",
    "plan_model",
    "plan_specs",
    "state_shapes",
]
