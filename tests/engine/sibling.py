"""A connector beside ours, whose loads end when the test says so."""

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base as v1


@dataclass
class Sibling:
    """What both roles of `LateConnector` share in the engine's process."""

    offers: int = 0
    """Tokens of any prompt that it claims to have."""
    held: bool = False
    """Its loads do not end."""
    caches: dict[str, Any] = field(default_factory=dict)
    pages: list[dict[str, Any]] = field(default_factory=list)
    """Of the request that ended last, by layer."""
    targets: dict[str, list[int]] = field(default_factory=dict)
    """Blocks that are to be filled, by request."""


SIBLING = Sibling()


class LateConnector(v1.KVConnectorBase_V1, v1.SupportsHMA):
    """Has the blocks of the last request, of a model with one group."""

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        tokens = max(0, SIBLING.offers - num_computed_tokens)
        return tokens, tokens > 0

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        if num_external_tokens:
            (row,) = blocks.get_block_ids()
            SIBLING.targets[request.request_id] = row[: len(SIBLING.pages)]

    def build_connector_meta(self, scheduler_output: Any) -> v1.KVConnectorMetadata:
        return v1.KVConnectorMetadata()

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, None]:
        if not SIBLING.pages:
            SIBLING.pages = [
                {layer: cache[b].clone() for layer, cache in SIBLING.caches.items()}
                for b in block_ids[0][: request.num_prompt_tokens // 128]
            ]
        return False, None

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        SIBLING.caches = kv_caches

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        if SIBLING.held:
            return set(), set()
        done, SIBLING.targets = SIBLING.targets, {}
        for row in done.values():
            for block, pages in zip(row, SIBLING.pages, strict=True):
                for layer, page in pages.items():
                    SIBLING.caches[layer][block] = page
        return set(), set(done)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads are asynchronous."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """It copies when a request ends."""

    def wait_for_save(self) -> None:
        """It copies when a request ends."""


def offer(llm: Any, tokens: int) -> None:
    """Let it claim so many tokens of every prompt."""
    del llm
    SIBLING.offers = tokens


def ask_while_held(llm: Any, prompt: list[int], steps: int) -> tuple[Any, Any]:
    """Ask with the sibling's load held for some steps.

    Returns:
        Blocks that are in our host memory or on their way while it is held, and the
        answer.
    """
    from tests.engine.asking import answer_of, greedy, scheduler

    engine = llm.llm_engine
    SIBLING.held = True
    engine.add_request("held", {"prompt_token_ids": prompt}, greedy(4))
    for _ in range(steps):
        engine.step()
    assert SIBLING.targets, "the sibling's load is under way"
    ours = scheduler(llm).connector.sub_connectors[1]._scheduler
    touched = ours._tier.num_stored_blocks + len(ours._jobs)
    SIBLING.held = False
    while True:
        for output in engine.step():
            if output.finished:
                return touched, answer_of(output)
