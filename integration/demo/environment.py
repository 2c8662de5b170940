"""The environment in which the demo and the tests start vLLM."""

from typing import Final

ENVIRONMENT: Final = {
    # The model is a local folder; nothing may be looked up on the network.
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # Other libraries' progress bars would tear ours.
    "TQDM_DISABLE": "1",
    # Threads that wait for others sleep: a few percent slower than spinning on idle
    # cores, several times faster where something else runs on them too.
    "OMP_WAIT_POLICY": "passive",
    # vLLM compiles a part of its sampler at the first request (20 s on two cores).
    "TORCH_COMPILE_DISABLE": "1",
}
"""Variables for every vLLM process."""
