"""Every operation has one public function, and the device decides who serves it."""

import inspect
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvplugin.errors import ConfigError
from kvplugin.kernels import dispatch
from kvplugin.kernels.region import Region
from kvplugin.kernels.streams import Direction
from kvplugin.layout import KVLayout, Part, plan_conversion

LAYOUT = KVLayout((Part("kv", 0, 64, 16, 16, 16),), 2, 4, 1)
REGION = Region(4096, 64, 64, 2)
MEMORY = (plan_conversion(LAYOUT, LAYOUT), 4096, 8192)

BUILT = {
    "block_copier": (
        ([REGION], [REGION]),
        ("host", "BlockCopier"),
        ("copy", "DeviceBlockCopier"),
    ),
    "block_converter": (
        MEMORY,
        ("host_convert", "BlockConverter"),
        ("permute", "DeviceBlockConverter"),
    ),
    "block_zeroer": (
        ([REGION],),
        ("host_zero", "BlockZeroer"),
        ("zero", "DeviceBlockZeroer"),
    ),
}
CALLED = {
    "copy_batch": (3, "host_batch", "copy"),
    "write_kv": (5, "host_cache_write", "cache_write"),
    "write_latent": (4, "host_cache_write", "cache_write"),
    "write_ds_mla": (4, "host_cache_write", "cache_write"),
    "slot_mappings": (4, "host_slots", "slots"),
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, tuple]]:
    """Calls that reach the engines: (module, name, arguments)."""
    calls: list[tuple[str, str, tuple]] = []

    def module(name: str) -> Any:
        class Recorder:
            def __getattr__(self, function: str) -> Any:
                return lambda *args, **_: calls.append((name, function, args))

        return Recorder()

    monkeypatch.setattr(dispatch, "_module", module)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return calls


@pytest.mark.parametrize("name", BUILT)
@pytest.mark.parametrize(
    ("device", "count"), [("cuda:0", 0), ("cuda", 0), ("cuda:2", 2)]
)
def test_a_gpu_that_is_not_there_is_refused(
    name: str, device: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(ConfigError, match=f"{device}.*torch finds {count} GPUs"):
        getattr(dispatch, name)(*BUILT[name][0], device=device)


def on(device: str) -> Any:
    """Something that says on which device it is."""
    return SimpleNamespace(device=torch.device(device), numpy=lambda: None)


@pytest.mark.parametrize("name", BUILT)
@pytest.mark.parametrize("device", ["cpu", "cuda:1", torch.device("cuda", 1)])
def test_engines_are_built_for_the_device(
    name: str, device: Any, asked: list[tuple[str, str, tuple]]
) -> None:
    args, host, gpu = BUILT[name]
    getattr(dispatch, name)(*args, device=device)
    if device == "cpu":
        assert asked == [(*host, args)]
    else:
        assert asked == [(*gpu, (*args, torch.device("cuda:1")))]


@pytest.mark.parametrize("name", CALLED)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_calls_go_where_the_tensors_are(
    name: str, device: str, asked: list[tuple[str, str, tuple]]
) -> None:
    count, host, gpu = CALLED[name]
    getattr(dispatch, name)(*[on(device)] * count)
    [(module, function, args)] = asked
    assert (module, function, len(args)) == (
        host if device == "cpu" else gpu,
        name,
        count,
    )


def test_every_operation_is_among_these() -> None:
    public = {
        name
        for name, value in vars(dispatch).items()
        if inspect.isfunction(value)
        and value.__module__ == dispatch.__name__
        and not name.startswith("_")
    }
    assert public == {*BUILT, *CALLED, "transfer_copier"}


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_transfers_know_their_direction(
    direction: Direction, device: str, asked: list[tuple[str, str, tuple]]
) -> None:
    on_device, on_host = [REGION], [Region(8192, 64, 64, 2)]
    dispatch.transfer_copier(on_device, on_host, direction, device, pinned=True)
    if device == "cpu":
        sides = (on_device, on_host)
        sides = sides[::-1] if direction is Direction.LOAD else sides
        assert asked == [("host", "BlockCopier", sides)]
    else:
        args = (on_device, on_host, direction, torch.device("cuda:1"), True)
        assert asked == [("transfer", "warm_copier", args)]


def test_a_transfer_of_a_device_without_engine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'mps:0'.*engines for cpu and cuda"):
        dispatch.transfer_copier([REGION], [REGION], Direction.LOAD, "mps:0")


@pytest.mark.parametrize("name", BUILT)
def test_a_device_without_engine_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"'mps:0'.*engines for cpu and cuda"):
        getattr(dispatch, name)(*BUILT[name][0], device="mps:0")


@pytest.mark.parametrize("name", CALLED)
def test_tensors_without_engine_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"'meta'.*engines for cpu and cuda"):
        getattr(dispatch, name)(*[on("meta")] * CALLED[name][0])


def test_copies_on_a_cpu_need_neither_torch_nor_triton() -> None:
    code = (
        "import sys; from kvplugin.kernels import dispatch; "
        "from kvplugin.kernels.region import Region; "
        "dispatch.block_copier([Region(4096, 64, 64, 2)], [Region(8192, 64, 64, 2)]); "
        "print(sorted({'torch', 'triton'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_what_is_dispatched_works_on_a_cpu() -> None:
    """Through the real engines, once each; their own tests know the details."""
    source = torch.arange(64, dtype=torch.uint8)
    target = torch.zeros(64, dtype=torch.uint8)
    regions = [[Region(memory.data_ptr(), 32, 32, 2)] for memory in (source, target)]
    assert dispatch.block_copier(*regions).copy([0], [1]) == 32
    assert target[32:].equal(source[:32])
    assert dispatch.block_zeroer(regions[1]).zero([1]) == 32
    assert not target.any()
    layout = KVLayout((Part("kv", 0, 32, 16, 16, 16),), 2, 2, 1)
    converter = dispatch.block_converter(
        plan_conversion(layout, layout), source.data_ptr(), target.data_ptr()
    )
    assert converter.convert([1], [0]) == 32
    assert target[:32].equal(source[32:])
    addresses = torch.tensor([[source.data_ptr()], [target.data_ptr()], [8]])
    dispatch.copy_batch(*addresses)
    assert target[:8].equal(source[:8])


def test_transfers_on_a_cpu_are_copies_like_others() -> None:
    device, host = (torch.arange(64, dtype=torch.uint8) + first for first in (0, 64))
    regions = [[Region(memory.data_ptr(), 32, 32, 2)] for memory in (device, host)]
    load = dispatch.transfer_copier(*regions, Direction.LOAD)
    assert load.copy([1], [0]) == load.block_bytes == 32
    assert device.tolist() == [*range(96, 128), *range(32, 64)]
    store = dispatch.transfer_copier(*regions, Direction.STORE, pinned=True)
    assert store.copy([1], [0]) == 32
    assert host.tolist() == [*range(32, 64), *range(96, 128)]
