"""Block hashes as vLLM's own `Request` gets them, and how long they take."""

import os
import time
from collections.abc import Callable
from typing import Any


def answer(request: dict[str, Any]) -> Any:
    """`{"seed", "cases", "hashes", "sizes"}`: the hashes of each case, and `hashes` as
    groups of other block sizes see them. `{"rounds", "tokens", "block_size"}`: times.
    """
    if "rounds" in request:
        return _measure(request["rounds"], request["tokens"], request["block_size"])
    hasher = _hasher("sha256_cbor", request["seed"])
    hashed = [_hashes(case, hasher) for case in request["cases"]]
    coarse = [_coarse(request["hashes"], *sizes) for sizes in request["sizes"]]
    return hashed, coarse


def _hasher(algorithm: str, seed: str | None) -> Callable[[int], Any]:
    from vllm.utils import hashing
    from vllm.v1.core import kv_cache_utils

    # `ask` sets it for the interpreter; here only vLLM reads it.
    os.environ.pop("PYTHONHASHSEED", None)
    if seed is not None:
        os.environ["PYTHONHASHSEED"] = seed
    digest = hashing.get_hash_fn_by_name(algorithm)
    kv_cache_utils.init_none_hash(digest)
    return lambda block_size: kv_cache_utils.get_request_block_hasher(
        block_size, digest
    )


def _hashes(case: dict[str, Any], hasher: Callable[[int], Any]) -> list[bytes]:
    request = _request(case, hasher(case["block_size"]))
    for tokens in case["appends"]:
        request.append_output_token_ids(tokens)
    return [bytes(block_hash) for block_hash in request.block_hashes]


def _coarse(hashes: list[bytes], fine: int, coarse: int) -> list[bytes]:
    from vllm.v1.core.kv_cache_utils import BlockHashListWithBlockSize

    return list(BlockHashListWithBlockSize(hashes, fine, coarse))


def _request(case: dict[str, Any], hasher: Any) -> Any:
    import torch
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    lora, embeds = case["lora"], case["embeds"]
    return Request(
        request_id="r",
        prompt_token_ids=case["tokens"],
        prompt_embeds=None if embeds is None else torch.tensor(embeds),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        mm_features=[
            MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset, length))
            for name, offset, length in case["media"]
        ],
        lora_request=None if lora is None else LoRARequest(lora[0], 1, lora[1]),
        cache_salt=case["salt"],
        block_hasher=hasher,
    )


def _measure(rounds: int, num_tokens: int, block_size: int) -> dict[str, list[float]]:
    """Microseconds by round: a block of each algorithm, and an appended token."""
    tokens = list(range(1000, 1000 + num_tokens))
    case = {"tokens": tokens, "embeds": None, "lora": None, "media": [], "salt": None}
    request = _request(case, None)
    taken: dict[str, list[float]] = {"sha256": [], "sha256_cbor": []}
    hashers = {name: _hasher(name, "0")(block_size) for name in taken}
    taken["sha256, append a token"] = []
    for _ in range(rounds):
        for name, hasher in hashers.items():
            start = time.perf_counter()
            found = hasher(request)
            taken[name].append((time.perf_counter() - start) / len(found) * 1e6)
        growing = _request(case | {"tokens": [0]}, hashers["sha256"])
        taken["sha256, append a token"].append(_appending(growing))
    return taken


def _appending(request: Any) -> float:
    start = time.perf_counter()
    for token in range(10_000):
        request.append_output_token_ids(token)
    return (time.perf_counter() - start) / 10_000 * 1e6
