"""Two pairs of vLLM engines: one with our connector, one with vLLM's own."""

import os
import signal
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import psutil

from kvplugin.integration.demo.build_once import build_once
from kvplugin.integration.demo.model import cache_folder, prepare_smollm2
from kvplugin.integration.demo.processes import HOST, free_ports
from kvplugin.integration.vllm.render import nixl_transfer_config
from tests.engine.host import EngineHost

SPARE_TOKENS: Final = 8192
"""Of a pool, beside the prompts: for requests that decode."""
LONGEST_ANSWER: Final = 1024
HUGE_PAGES: Final = {"THP_MEM_ALLOC_ENABLE": "1"}
"""torch takes all memory in huge pages."""


class Pair(NamedTuple):
    """A producer and a consumer."""

    prefill: EngineHost
    decode: EngineHost

    @contextmanager
    def awake(self) -> Iterator[None]:
        """While all others are stopped: an idle agent of vLLM's connector keeps a core
        busy, and nobody's transfers should pay for those of another pair."""
        self.send(signal.SIGCONT)
        try:
            yield
        finally:
            self.send(signal.SIGSTOP)

    def send(self, number: signal.Signals) -> None:
        """Signal all processes of both engines that are left."""
        for host in self:
            with suppress(psutil.NoSuchProcess):
                engine = psutil.Process(host.pid)
                for process in (engine, *engine.children(recursive=True)):
                    with suppress(psutil.NoSuchProcess):
                        process.send_signal(number)


class Model(NamedTuple):
    """What the engines serve."""

    folder: Path
    token_bytes: int
    """KV of one token, all layers."""
    layer_bytes: int
    """KV of one token, one layer."""


def find_model(name: str) -> Model:
    """``llama``: 8 random layers with 8 KV heads of 64; ``smollm2``: the real one."""
    if name == "smollm2":
        return Model(prepare_smollm2(cache_folder()), 30 * 768, 768)
    folder = build_once(cache_folder() / "llama-8-layers", _random_llama)
    return Model(folder, 8 * 2048, 2048)


def _random_llama(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


@contextmanager
def pairs(
    model: Model,
    *,
    tokens: int,
    prompts: int,
    block_size: int,
    huge_pages: bool,
    settings: Mapping[str, Any],
    logs: Path,
) -> Iterator[dict[str, Pair]]:
    """Both pairs, ``ours`` and ``theirs``, stopped; gone when the block is left.

    Args:
        model: what they serve.
        tokens: of a prompt.
        prompts: that the producers keep in their prefix caches.
        block_size: of all four.
        huge_pages: for all four, not only for those whose connector sees to it.
        settings: of our connector, by key.
        logs: folder for what they print.
    """
    blocks = -(-(prompts * tokens + SPARE_TOKENS) // block_size)
    cores = sorted(os.sched_getaffinity(0))
    pages = HUGE_PAGES if huge_pages else {}
    plan = [
        (connector, role, core)
        for connector in ("ours", "theirs")
        for role, core in (("producer", cores[0]), ("consumer", cores[-1]))
    ]

    def start(one: tuple[str, str, int]) -> EngineHost:
        connector, role, core = one
        return EngineHost(
            logs / f"{connector}-{role}.log",
            environment={"VLLM_CPU_OMP_THREADS_BIND": str(core)} | pages | _channel(),
            model=str(model.folder),
            skip_tokenizer_init=True,
            block_size=block_size,
            kv_cache_memory_bytes=blocks * block_size * model.token_bytes,
            max_model_len=max(tokens, LONGEST_ANSWER) + block_size,
            max_num_batched_tokens=2048,
            max_num_seqs=blocks,  # see `fragment`
            # The prompts come from the producer's cache each time, and never from the
            # consumer's.
            enable_prefix_caching=role == "producer",
            # As in a server: the worker is a process of its own. The scheduler is in
            # ours, where its pool can be looked at.
            distributed_executor_backend="mp",
            worker_extension_cls="benchmarks._pd_worker.Watch",
            kv_transfer_config=_transfer_config(connector, role, settings),
        )

    with ThreadPoolExecutor(len(plan)) as pool:
        futures = [pool.submit(start, one) for one in plan]
    try:
        engines = [future.result() for future in futures]
        both = {"ours": Pair(*engines[:2]), "theirs": Pair(*engines[2:])}
        for pair in both.values():
            pair.send(signal.SIGSTOP)
        try:
            yield both
        finally:
            for pair in both.values():
                pair.send(signal.SIGCONT)
    finally:
        for future in futures:
            if future.exception() is None:
                future.result().close()


def _channel() -> dict[str, str]:
    (port,) = free_ports(1)
    return {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
    }


def _transfer_config(connector: str, role: str, settings: Mapping[str, Any]) -> Any:
    if connector == "ours":
        return nixl_transfer_config(role, dict(settings), "fail")
    return {
        "kv_connector": "NixlConnector",
        "kv_role": f"kv_{role}",
        "kv_load_failure_policy": "fail",
    }
