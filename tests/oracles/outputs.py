"""What a model runner of vLLM's answers a scheduler."""

from typing import Any

from vllm.v1.outputs import ModelRunnerOutput


def model_output(tokens: dict[str, list[int]], **more: Any) -> ModelRunnerOutput:
    """New tokens by request.

    Args:
        tokens: of each request that ran, none of one that goes on with its prompt.
        more: other fields.
    """
    names = list(tokens)
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: i for i, name in enumerate(names)},
        sampled_token_ids=list(tokens.values()),
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
        **more,
    )
