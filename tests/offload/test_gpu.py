"""The worker half beside a real GPU: bytes out, bytes in, whatever its engines."""

import pytest
import torch

from kvplugin.connectors.offload.capacity import host_pools
from kvplugin.connectors.offload.config import OffloadConfig
from kvplugin.connectors.offload.messages import Report
from kvplugin.connectors.offload.worker import OffloadWorker
from kvplugin.contract import EngineInfo, GroupInfo, GroupKind, KVTensor
from kvplugin.layout import PageLayout, TensorLayout
from kvplugin.wire import decode
from tests.offload.plans import order, plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

BLOCKS = 64


def layer(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """A layer's KV: [blocks, ...] in bf16, on the GPU."""
    generator = torch.Generator().manual_seed(seed)
    content = torch.randn((BLOCKS, *shape), generator=generator)
    return content.to("cuda:0", torch.bfloat16)


def described(tensor: torch.Tensor) -> KVTensor:
    size = tensor.element_size()
    layout = TensorLayout(
        tuple(tensor.shape),
        tuple(stride * size for stride in tensor.stride()),
        size,
        str(tensor.dtype),
        0,
    )
    return KVTensor(tensor.data_ptr(), layout, str(tensor.device))


def group(index: int, kind: GroupKind, layers: dict[str, torch.Tensor]) -> GroupInfo:
    pages = {
        name: PageLayout(tensor[0].numel() * tensor.element_size(), BLOCKS)
        for name, tensor in layers.items()
    }
    return GroupInfo(index, kind, 16, pages, window=32)


@pytest.mark.parametrize("heads", [2, 64], ids=["small pages", "large pages"])
def test_blocks_of_two_groups_come_back_whole(heads: int) -> None:
    """Many small pieces go in by a kernel, large ones by the copy engines."""
    full = {f"full.{i}": layer((heads, 16, 32), i) for i in range(4)}
    window = {f"window.{i}": layer((heads, 16, 48), 9 + i) for i in range(2)}
    groups = (
        group(0, GroupKind.FULL, full),
        group(1, GroupKind.SLIDING_WINDOW, window),
    )
    info = EngineInfo("engine", groups, BLOCKS, hash_block_size=16)
    config = OffloadConfig(cpu_bytes_to_use=1 << 28)
    worker = OffloadWorker(info, config)
    worker.register({n: described(t) for n, t in (full | window).items()})
    pools = host_pools(info, config)
    sources, targets = list(range(1, 21)), list(range(40, 60))
    wanted = {n: t[sources].clone() for n, t in (full | window).items()}
    busy = torch.randn(4096, 4096, device="cuda:0")

    def step(number: int, **orders: list) -> set[int]:
        """A forward, then the plan's copies, as vLLM 0.32 does."""
        torch.mm(busy, busy)
        worker.begin_step(plan(info, number, pools, **orders))
        worker.end_step()
        done = decode(worker.poll().report, Report).completions
        rest = decode(worker.drain(), Report).completions
        assert not any(completion.error for completion in (*done, *rest))
        return {completion.id for completion in (*done, *rest)}

    hosts = [*range(20)]
    assert step(
        1, stores=[order(1, sources, hosts, 0), order(2, sources, hosts[::-1], 1)]
    ) == {1, 2}
    loads = [order(3, targets, hosts, 0), order(4, targets, hosts[::-1], 1)]
    found = step(2, loads=loads)
    number = 2
    while len(found) < 2:
        number += 1
        found |= step(number)
    for name, tensor in (full | window).items():
        assert torch.equal(tensor[targets], wanted[name]), name
    worker.close()
