"""What is inside the pages of vLLM's KV tensors: where rows lie, where that is known.

A page of which nobody knows the inside can still be moved to an engine whose page has
the same inside, which its name says (`kvplugin.contract.KVTensor.interior`).
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    KVCacheConfig,
    MambaSpec,
    MLAAttentionSpec,
)

from kvplugin import spec as ours
from kvplugin.contract import KVTensor
from kvplugin.errors import KVPluginError
from kvplugin.integration.vllm.cpu_pages import PageKind, page_rows, probe
from kvplugin.integration.vllm.states import conv_layout, parts_of_states
from kvplugin.integration.vllm.translate import layer_specs
from kvplugin.integration.vllm.versions import has_standard_views
from kvplugin.layout import KVLayout
from kvplugin.worker.backend_table import BACKENDS
from kvplugin.worker.describe import plan_rows, recognise
from kvplugin.worker.views import AttentionPlan

logger = logging.getLogger("vllm.kvplugin.nixl")

CPU_ATTENTION: Final = "CPU_ATTN"
_PLAIN_LATENTS: Final = ("CPU_MLA", "AMX_MLA", "TRITON_MLA")
"""MLA backends that keep latents token by token, and are not in the table."""


def with_rows(
    tensors: Mapping[str, KVTensor], vllm_config: Any, kv_cache_config: KVCacheConfig
) -> dict[str, KVTensor]:
    """The same tensors, with what is inside their pages.

    One WARNING names layers whose pages can only be moved as they are, and why.

    Args:
        tensors: of this rank, by layer.
        vllm_config: vLLM's; its layers are in this process.
        kv_cache_config: vLLM's, of this rank.
    """
    made = vllm_config.compilation_config.static_forward_context
    rank = _Rank(vllm_config, kv_cache_config.num_blocks)
    known = dict(tensors)
    unknown: dict[str, str] = {}
    for group in kv_cache_config.kv_cache_groups:
        for name, spec in layer_specs(group).items():
            if name not in tensors:
                continue
            layer = _Layer(name, spec, made.get(name), tensors[name], rank)
            known[name] = layer.described(unknown)
    if unknown:
        reason, *others = dict.fromkeys(unknown.values())
        logger.warning(
            "kvplugin nixl: blocks of %d layers are moved as they are, to and from "
            "engines that lay them out the same way: %s%s",
            len(unknown),
            reason,
            f" (and {len(others)} other reasons)" if others else "",
        )
    return known


class _Rank:
    """What all layers of a rank have in common."""

    def __init__(self, vllm_config: Any, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.dtype: torch.dtype = vllm_config.model_config.dtype
        self.cache_dtype = str(vllm_config.cache_config.cache_dtype)
        parallel = vllm_config.parallel_config
        self.tp_size = int(parallel.tensor_parallel_size)
        self.tp_rank = parallel.rank % parallel.world_size % self.tp_size
        self.model_heads = int(vllm_config.model_config.get_total_num_kv_heads())


@dataclass(frozen=True, slots=True)
class _Layer:
    name: str
    spec: Any
    made: Any
    """vLLM's layer; None if it is not among those of the model."""
    tensor: KVTensor
    rank: _Rank

    def described(self, unknown: dict[str, str]) -> KVTensor:
        """The tensor with its rows; why there are none goes to `unknown`."""
        if isinstance(self.spec, MambaSpec):
            state = parts_of_states(self.spec, self.made, self.rank.tp_size)
            interior = self._interior_of_states(is_known=bool(state))
            return replace(self.tensor, interior=interior, state=state)
        try:
            rows = self._rows()
        except Exception as error:  # whatever vLLM's probing comes to
            unknown[self.name] = f"{type(error).__name__}: {error}"
            rows = None
        return replace(
            self.tensor,
            rows=rows,
            interior=self._interior(rows),
            total_heads=self._total_heads(),
        )

    def _rows(self) -> KVLayout:
        if (reason := self._peculiar()) is not None:
            raise KVPluginError(f"{self.backend}: {reason}")
        layout = self._rows_of_the_backend()
        return replace(layout, dtype=f"{layout.dtype}{self._scales()}")

    def _rows_of_the_backend(self) -> KVLayout:
        if self.backend == CPU_ATTENTION:
            kind = PageKind(
                self.rank.dtype,
                self.spec.dtype,
                self.kv_cache_dtype,
                self._kernel_block_size(),
                self.spec.head_size,
            )
            return page_rows(probe(kind), self.tensor.layout, self._split())
        if self.backend in _PLAIN_LATENTS:
            axes = ("block", "head", "token", "dim")
            return KVLayout.of_tensor(
                self.tensor.layout,
                axes if has_standard_views() else ("block", "token", "dim"),
                name=self.backend,
                split=self._split(),
            )
        name = self.backend + ("@0.32" if has_standard_views() else "")
        if name not in BACKENDS:
            raise KVPluginError(f"attention backend {self.backend} is not known")
        plan = AttentionPlan(
            layer=self.name,
            spec=_our_spec(self.spec),
            backend=BACKENDS[name],
            layout=next(iter(BACKENDS[name].orders)),
            num_blocks=self.rank.num_blocks,
            block_size=self._kernel_block_size(),
        )
        return plan_rows(recognise(self.tensor.layout, plan))

    def _peculiar(self) -> str | None:
        """What of the spec no table knows."""
        if not isinstance(self.spec, AttentionSpec):
            return f"{type(self.spec).__name__} is not known"
        for field, plain in (
            ("tokens_per_state", 1),
            ("num_head_slots", None),
            ("state_content_bytes", None),
        ):
            if (value := getattr(self.spec, field, plain)) != plain:
                return f"{field}={value}"
        return None

    @property
    def backend(self) -> str:
        """vLLM's name."""
        if not hasattr(self.made, "get_attn_backend"):
            return type(self.made).__name__
        return str(self.made.get_attn_backend().get_name())

    @property
    def kv_cache_dtype(self) -> str:
        """vLLM's name for how keys and values are stored."""
        return str(getattr(self.made, "kv_cache_dtype", self.rank.cache_dtype))

    def _scales(self) -> str:
        """By which keys and values have been divided; empty for one."""
        names = ("_k_scale_float", "_v_scale_float")
        scales = [float(getattr(self.made, name, 1.0)) for name in names]
        return "" if scales == [1.0, 1.0] else "*{!r}*{!r}".format(*scales)

    def _split(self) -> int:
        layout = self.tensor.layout
        return max(1, layout.shape[layout.block_axis] // self.rank.num_blocks)

    def _kernel_block_size(self) -> int:
        return int(self.spec.block_size) // self._split()

    def _interior(self, rows: KVLayout | None) -> str:
        """Backend, dtypes, order in memory: all that a page's bytes depend on."""
        layout = self.tensor.layout
        inside = [
            (size, step)
            for axis, (size, step) in enumerate(
                zip(layout.shape, layout.strides, strict=True)
            )
            if axis != layout.block_axis and size > 1
        ]
        order = sorted(range(len(inside)), key=lambda axis: -inside[axis][1])
        return "/".join(
            (
                self.backend,
                type(self.spec).__name__,
                self.kv_cache_dtype,
                layout.dtype + self._scales(),
                rows.name if rows is not None else "",
                rows.packing if rows is not None else "",
                ",".join(map(str, order)),
            )
        )

    def _interior_of_states(self, *, is_known: bool) -> str:
        """Without what the parts of a state say, where they are known."""
        spec = self.spec
        parts = [
            type(spec).__name__,
            str(getattr(spec, "mamba_type", "")),
            *(str(dtype).removeprefix("torch.") for dtype in spec.dtypes),
            conv_layout(),
            self.tensor.device.partition(":")[0],
        ]
        if not is_known:
            parts += [str(tuple(shape)).replace(" ", "") for shape in spec.shapes]
            if self.rank.tp_size > 1:
                parts.append(f"rank {self.rank.tp_rank} of {self.rank.tp_size}")
        return "/".join(parts)

    def _total_heads(self) -> int:
        if isinstance(self.spec, MLAAttentionSpec) or not isinstance(
            self.spec, AttentionSpec
        ):
            return 0
        heads, ranks = int(self.spec.num_kv_heads), self.rank.tp_size
        shards = getattr(self.spec, "max_tp_shards", None)
        if shards is None and heads == 1:
            # Ranks beyond the number of heads hold copies.
            shards = self.rank.model_heads
        return heads * min(ranks, shards or ranks)


def _our_spec(spec: Any) -> ours.AttentionSpec:
    """As far as it decides the inside of a page."""
    common = {
        "block_size": int(spec.block_size),
        "num_kv_heads": int(spec.num_kv_heads),
        "head_size": int(spec.head_size),
        "dtype": str(spec.dtype).removeprefix("torch."),
        "page_size_padded": spec.page_size_padded,
    }
    if isinstance(spec, MLAAttentionSpec):
        return ours.MLAAttentionSpec(**common, cache_dtype_str=spec.cache_dtype_str)
    value = getattr(spec, "head_size_v", None)
    return ours.FullAttentionSpec(**common, head_size_v=value)
