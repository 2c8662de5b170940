"""Shapes of recurrent states (vLLM 0.32 `model_executor/layers/mamba/mamba_utils.py`).

Each is the convolution's state, where there is one, then the recurrence's.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from kvplugin.errors import ConfigError, unknown_name

Shapes = tuple[tuple[int, ...], ...]


def state_shapes(kind: str, config: Mapping[str, Any], ranks: int = 1) -> Shapes:
    """Shapes of a state of one rank of `ranks`.

    Args:
        kind: `mamba1`, `mamba2`, `gated_deltanet` or `lightning_linear`.
        config: fields of the model's config.json.
        ranks: tensor-parallel size.

    Raises:
        ConfigError: an unknown kind, or sizes that the ranks do not divide.
    """
    if kind not in _SHAPES:
        raise unknown_name("recurrent layer", kind, _SHAPES, "kind")
    return _SHAPES[kind](config, ranks)


def _share(size: int, ranks: int) -> int:
    if size % ranks:
        raise ConfigError(
            f"a recurrent state of {size} is not divided by tensor_parallel_size "
            f"{ranks}"
        )
    return size // ranks


def _mamba1(config: Mapping[str, Any], ranks: int) -> Shapes:
    inner = _share(config["mamba_expand"] * config["hidden_size"], ranks)
    conv = config["mamba_d_conv"] - 1
    return ((inner, conv), (inner, config["mamba_d_state"]))


def _mamba2(config: Mapping[str, Any], ranks: int) -> Shapes:
    # Two spellings: Bamba and Granite, Nemotron.
    state = config.get("mamba_d_state") or config["ssm_state_size"]
    heads = config.get("mamba_n_heads") or config["mamba_num_heads"]
    head_size = config.get("mamba_d_head") or config["mamba_head_dim"]
    groups = config.get("mamba_n_groups") or config["n_groups"]
    kernel = config.get("mamba_d_conv") or config["conv_kernel"]
    if groups % ranks:
        # Each rank needs the groups of its heads, so they are replicated.
        groups = ranks
    channels = heads * head_size + 2 * groups * state
    return (
        (_share(channels, ranks), kernel - 1),
        (_share(heads, ranks), head_size, state),
    )


def _gated_deltanet(config: Mapping[str, Any], ranks: int) -> Shapes:
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    value_heads, value_size = (
        config["linear_num_value_heads"],
        config["linear_value_head_dim"],
    )
    channels = 2 * keys + value_heads * value_size
    return (
        (_share(channels, ranks), config["linear_conv_kernel_dim"] - 1),
        (_share(value_heads, ranks), value_size, config["linear_key_head_dim"]),
    )


def _lightning_linear(config: Mapping[str, Any], ranks: int) -> Shapes:
    heads, size = config["num_attention_heads"], config["head_dim"]
    return ((_share(heads, ranks), size, size),)


_SHAPES: Final[Mapping[str, Callable[[Mapping[str, Any], int], Shapes]]] = {
    "mamba1": _mamba1,
    "mamba2": _mamba2,
    "gated_deltanet": _gated_deltanet,
    "lightning_linear": _lightning_linear,
}
