"""What a request must be for this model, asked before anything is kept of it."""

from collections.abc import Sequence

from kvplugin.integration.reference.config import ModelConfig
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
