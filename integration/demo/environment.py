"""How the demo starts vLLM: its environment and its connector configuration."""

from typing import Any, Final

ENVIRONMENT: Final = {
    # The model is a local folder; nothing may be looked up on the network.
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # Other libraries' progress bars would tear ours.
    "TQDM_DISABLE": "1",
    # Threads that wait for others sleep. By default they spin, and whatever else runs
    # on the same cores makes vLLM many times slower.
    "OMP_WAIT_POLICY": "passive",
    # vLLM compiles a part of its sampler at the first request (20 s on two cores).
    "TORCH_COMPILE_DISABLE": "1",
}
"""Variables for every vLLM process of the demo."""


def transfer_config(cpu_bytes: int) -> dict[str, Any]:
    """vLLM's `kv_transfer_config` that turns kvplugin's offload on.

    Args:
        cpu_bytes: host memory for KV, in bytes.
    """
    return {
        "kv_connector": "KVPluginOffloadConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"cpu_bytes_to_use": cpu_bytes},
    }
