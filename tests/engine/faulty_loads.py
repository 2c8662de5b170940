"""A connector whose synchronous loads fail, and what users do meanwhile.

The connector claims a prefix of requests called "owner...", fills their blocks with one
value and reports them as failed in the same step, as `kv_connector_module_path` of an
engine in one process. Functions as in `asking`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

from tests.engine.asking import Answer, answer_of, scheduler

OWNER = "owner"


@dataclass
class _Loads(KVConnectorMetadata):
    """Blocks that the step should load."""

    blocks: set[int]


class FaultyConnector(KVConnectorBase_V1, SupportsHMA):
    """Both halves; every load fails."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._size = self._vllm_config.cache_config.block_size
        self._num_blocks = kv_cache_config.num_blocks
        self._local: dict[str, int] = {}
        self._blocks: set[int] = set()
        self._failed: set[int] = set()
        self._tensors: list[Any] = []

    # -- scheduler

    def get_num_new_matched_tokens(self, request: Any, local: int) -> tuple[int, bool]:
        if not request.request_id.startswith(OWNER):
            return 0, False
        self._local[request.request_id] = local
        whole = (request.num_prompt_tokens - 1) // self._size * self._size
        return max(whole - local, 0), False

    def update_state_after_alloc(self, request: Any, blocks: Any, n: int) -> None:
        if n:
            begin = self._local[request.request_id]
            places = slice(begin // self._size, (begin + n) // self._size)
            for ids in blocks.get_block_ids():
                self._blocks.update(block for block in ids[places] if block)

    def build_connector_meta(self, scheduler_output: Any) -> _Loads:
        blocks, self._blocks = self._blocks, set()
        return _Loads(blocks)

    def request_finished_all_groups(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, None]:
        return False, None

    # -- worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._tensors = [self._by_block(cache) for cache in kv_caches.values()]

    def _by_block(self, cache: Any) -> Any:
        """The tensor with its blocks outermost; before 0.32 K and V are, and there may
        be several blocks of the attention kernel to one."""
        axis = 0 if cache.shape[0] >= self._num_blocks else 1
        return cache.movedim(axis, 0).unflatten(0, (self._num_blocks, -1))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        blocks = self._get_connector_metadata().blocks
        for tensor in self._tensors:
            tensor[sorted(blocks)] = 3.0
        self._failed |= blocks

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...


def faulty(failure_policy: str) -> Any:
    """`kv_transfer_config` with the connector."""
    return {
        "kv_connector": FaultyConnector.__name__,
        "kv_connector_module_path": __name__,
        "kv_role": "kv_both",
        "kv_load_failure_policy": failure_policy,
    }


def abort_after_the_failure(llm: Any, prompt: list[int]) -> Answer:
    """The owner leaves after the step whose load failed; another asks the same."""
    _add(llm, OWNER, prompt)
    llm.llm_engine.step()
    (internal,) = [name for name in scheduler(llm).requests if name.startswith(OWNER)]
    llm.llm_engine.abort_request([OWNER])
    assert internal not in scheduler(llm).requests
    _add(llm, "next", prompt)
    return _finish(llm)["next"]


def arrive_after_the_failure(llm: Any, prompt: list[int]) -> tuple[Answer, Answer]:
    """Another asks the same while the owner is computed again, in chunks."""
    _add(llm, OWNER, prompt)
    early = llm.llm_engine.step()
    _add(llm, "next", prompt)
    answers = _finish(llm, early)
    return answers[OWNER], answers["next"]


def arrive_together(llm: Any, prompts: Sequence[list[int]]) -> list[Answer]:
    """The first is the owner; the others share what they can of its load."""
    names = [OWNER, *(f"sharer{i}" for i in range(1, len(prompts)))]
    for name, prompt in zip(names, prompts, strict=True):
        _add(llm, name, prompt)
    answers = _finish(llm)
    return [answers[name] for name in names]


def _add(llm: Any, name: str, prompt: list[int]) -> None:
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0.0, max_tokens=8, logprobs=5, detokenize=False)
    llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, greedy)


def _finish(llm: Any, early: Iterable[Any] = ()) -> dict[str, Answer]:
    outputs = list(early)
    while llm.llm_engine.has_unfinished_requests():
        outputs += llm.llm_engine.step()
    return {o.request_id: answer_of(o) for o in outputs if o.finished}
