"""What vLLM's own classes make of a KV cache; runs in a process that sees vLLM.

`python -m tests.worker_tensors.vllm_views VERSION < request > answer`, both pickled.
Backend classes are asked without a device: packages that only a GPU build has are
stood in for by empty ones, since shapes and orders do not come from them.
"""

import importlib
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from typing import Any
from unittest.mock import MagicMock

from tests.oracles import ROOT, V019, environment

_BACKENDS_019 = {
    "FLASH_ATTN": "flash_attn.FlashAttentionBackend",
    "FLASHINFER": "flashinfer.FlashInferBackend",
    "TRITON_ATTN": "triton_attn.TritonAttentionBackend",
    "FLEX_ATTENTION": "flex_attention.FlexAttentionBackend",
    "TREE_ATTN": "tree_attn.TreeAttentionBackend",
    "ROCM_ATTN": "rocm_attn.RocmAttentionBackend",
    "CPU_ATTN": "cpu_attn.CPUAttentionBackend",
    "FLASH_ATTN_DIFFKV": "flash_attn_diffkv.FlashAttentionDiffKVBackend",
    "TRITON_MLA": "mla.triton_mla.TritonMLABackend",
    "FLASHMLA": "mla.flashmla.FlashMLABackend",
    "FLASHMLA_SPARSE": "mla.flashmla_sparse.FlashMLASparseBackend",
    "FLASHMLA_SPARSE_FP8": "mla.flashmla_sparse.FlashMLASparseBackend",
}


def ask(version: str, request: Sequence[Any]) -> list[Any]:
    """An answer for each entry of the request.

    Raises:
        RuntimeError: vLLM failed; the message ends with its traceback.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tests.worker_tensors.vllm_views", version],
        input=pickle.dumps(list(request)),
        capture_output=True,
        cwd=ROOT,
        env=environment(version),
        timeout=300,
    )
    if done.returncode:
        raise RuntimeError(f"vLLM {version}:\n{done.stderr.decode()}")
    return pickle.loads(done.stdout)


def shape_and_order(
    name: str, layout: str, layers: bool, sizes: tuple[int, ...], value_size: int
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Shape and stride order of a backend of 0.19.1; None where it has no order."""
    from vllm.v1.attention.backends import utils

    backend = _backend(name)
    if hasattr(backend, "set_head_size_v"):
        backend.set_head_size_v(value_size)
    utils.get_kv_cache_layout.cache_clear()
    utils.set_kv_cache_layout(layout)
    dtype = "fp8_ds_mla" if name == "FLASHMLA_SPARSE_FP8" else "auto"
    shape = backend.get_kv_cache_shape(*sizes, cache_dtype_str=dtype)
    try:
        order = backend.get_kv_cache_stride_order(layers)
    except (AttributeError, NotImplementedError):
        return shape, None
    return shape, order


def views(
    kind: str,
    fields: dict[str, Any],
    num_blocks: int,
    num_layers: int,
    layout: str,
    block_size: int,
) -> list[tuple[Any, ...]]:
    """Shape, strides and offset in bytes of each layer's view of 0.32."""
    import torch
    from vllm.v1 import kv_cache_interface as interface
    from vllm.v1.kv_cache_layout import KVCacheLayout

    from tests.oracles.vllm_core import spec as make_spec

    spec, order = make_spec((kind, fields)), KVCacheLayout[layout]
    page = spec.page_size_bytes
    strides = interface.compute_layout_strides(spec, num_blocks, num_layers, order)
    tensor = interface.KVCacheTensor(
        size=page * num_blocks * num_layers,
        layers=[f"layer.{i}" for i in range(num_layers)],
        layer_stride=strides[0],
        block_stride=strides[1],
    )
    raw = torch.zeros(tensor.size, dtype=torch.int8)
    made = interface.create_kv_cache_views(
        raw, spec, num_blocks, order, tensor, block_size
    )
    return [
        (
            tuple(view.shape),
            tuple(step * view.element_size() for step in view.stride()),
            view.storage_offset() * view.element_size(),
            str(view.dtype).removeprefix("torch."),
        )
        for view in made
    ]


def _backend(name: str) -> Any:
    module, _, cls = _BACKENDS_019[name].rpartition(".")
    return getattr(importlib.import_module(f"vllm.v1.attention.backends.{module}"), cls)


class _StandIns:
    """Finds packages that are missing here as empty ones."""

    _MISSING = ("flashinfer", "aiter", "vllm.vllm_flash_attn", "flash_attn")

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if not any(name == m or name.startswith(m + ".") for m in self._MISSING):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        module = MagicMock(name=spec.name)
        module.__spec__, module.__path__ = spec, []
        return module

    def exec_module(self, module: Any) -> None:
        pass


def _main(version: str) -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # vLLM prints while it is imported; the answer needs a clean stream.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    function = views
    if version == V019:
        sys.meta_path.append(_StandIns())
        function = shape_and_order
    import vllm

    if vllm.__version__.split("+")[0] != version:
        raise SystemExit(f"vLLM {version} wanted, {vllm.__version__} found")
    request = pickle.load(sys.stdin.buffer)
    answers.write(pickle.dumps([function(*entry) for entry in request]))
    answers.close()


if __name__ == "__main__":
    _main(*sys.argv[1:])
