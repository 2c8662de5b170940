"""vLLM's core objects from neutral descriptions; imported under vLLM only.

A group is described as ``(class name of its spec, keyword arguments)``, dtypes by
name, so that one description serves both versions and ours.
"""

import inspect
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1 import kv_cache_interface
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import Request

Group = tuple[str, dict[str, Any]]


def spec(group: Group) -> Any:
    """The spec that the group describes."""
    name, fields = group
    fields = dict(fields)
    if "dtype" in fields:
        fields["dtype"] = getattr(torch, fields["dtype"])
    if "dtypes" in fields:
        fields["dtypes"] = tuple(getattr(torch, name) for name in fields["dtypes"])
    return getattr(kv_cache_interface, name)(**fields)


def config(num_blocks: int, groups: list[Group]) -> Any:
    """A KVCacheConfig without tensors, one layer a group."""
    return kv_cache_interface.KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[
            kv_cache_interface.KVCacheGroupSpec([f"layer{i}"], spec(group))
            for i, group in enumerate(groups)
        ],
    )


def manager(
    num_blocks: int,
    groups: list[Group],
    max_model_len: int,
    hash_block_size: int,
    **options: Any,
) -> KVCacheManager:
    """A KVCacheManager; options that this version does not know are left out."""
    known = inspect.signature(KVCacheManager).parameters
    options["scheduler_block_size"] = options.get(
        "scheduler_block_size", hash_block_size
    )
    return KVCacheManager(
        config(num_blocks, groups),
        max_model_len,
        hash_block_size=hash_block_size,
        **{name: value for name, value in options.items() if name in known},
    )


def hasher(block_size: int, algorithm: str = "sha256_cbor") -> Any:
    """A request's block hasher; initialises the root hash from PYTHONHASHSEED."""
    function = get_hash_fn_by_name(algorithm)
    kv_cache_utils.init_none_hash(function)
    return kv_cache_utils.get_request_block_hasher(block_size, function)


def request(request_id: str, tokens: list[int], block_hasher: Any) -> Request:
    """A request for any number of output tokens."""
    params = SamplingParams(max_tokens=1 << 20)
    params.update_from_generation_config({}, eos_token_id=1)
    eos = {"eos_token_id"} & inspect.signature(Request).parameters.keys()
    return Request(
        request_id,
        tokens,
        params,
        None,
        block_hasher=block_hasher,
        **dict.fromkeys(eos, 1),
    )
