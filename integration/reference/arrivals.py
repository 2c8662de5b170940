"""What a request or a drafter must be for this engine, asked before it is kept."""

from collections.abc import Sequence

from kvplugin.errors import ConfigError
from kvplugin.integration.reference.config import EngineConfig, ModelConfig
from kvplugin.integration.reference.ranks import Drafter
from kvplugin.request import RequestError


def check_tokens(
    req_id: str,
    prompt: Sequence[int],
    encoder_token_ids: Sequence[int],
    model: ModelConfig,
    max_encoder_tokens: int,
) -> None:
    """Refuse tokens that the model does not have.

    Raises:
        RequestError: naming the request and what is wrong with it.
    """
    for what, tokens in (("prompt", prompt), ("encoder", encoder_token_ids)):
        for token in tokens:
            if type(token) is not int or not 0 <= token < model.vocab_size:
                raise RequestError(
                    f"request {req_id!r} has {token!r} among its {what} tokens: they "
                    f"must be 0 to vocab_size-1, {model.vocab_size - 1}"
                )
    count, has_cross = len(encoder_token_ids), _has_cross_attention(model)
    if not (1 if has_cross else 0) <= count <= max_encoder_tokens:
        raise RequestError(
            f"request {req_id!r} has {count} encoder_token_ids: the model "
            f"{'needs at least one' if has_cross else 'needs none'}, and at most "
            f"max_num_encoder_input_tokens={max_encoder_tokens} are served"
        )


def _has_cross_attention(model: ModelConfig) -> bool:
    return any(layer.kind == "cross" for layer in model.layers)


def check_drafter(drafter: Drafter | None, config: EngineConfig) -> None:
    """Refuse drafts that nobody makes, or that were meant for another engine.

    Raises:
        ConfigError: naming the setting.
    """
    if drafter is None:
        if config.num_drafts:
            raise ConfigError(
                f"num_drafts={config.num_drafts} needs a drafter: give the engine one, "
                "or leave it 0"
            )
        return
    made_for = getattr(drafter, "config", config)
    for key in ("num_drafts", "tensor_parallel_size", "max_model_len", "block_size"):
        one, other = getattr(made_for, key), getattr(config, key)
        if one != other:
            raise ConfigError(f"the drafter was made for {key}={one}, not {other}")
