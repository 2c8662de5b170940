"""Every kind of group is served, or refused by its name."""

from dataclasses import replace
from itertools import combinations
from typing import Final

import pytest

from kvplugin.connectors.coverage import unserved
from kvplugin.connectors.offload.chunks import chunkings
from kvplugin.connectors.offload.config import OffloadConfig
from kvplugin.connectors.offload.scheduler import OffloadScheduler
from kvplugin.contract import EngineInfo, GroupKind
from kvplugin.errors import ConfigError
from kvplugin.spec import KVCacheSpec
from tests.core.manager_setups import chunk, cross, full, mamba, mla, sink, window
from tests.offload.hybrid_lab import HybridLab
from tests.offload.hybrid_mixes import Mix
from tests.offload.hybrid_oracle import Prefill

SERVED: Final[dict[str, KVCacheSpec]] = {
    "full": full(),
    "full with a sink": sink(4),
    "latent": mla(),
    "window": window(6),
    "chunk": chunk(8),
    "aligned states": mamba("align"),
    "states": mamba("all"),
}
REFUSED: Final = {GroupKind.CROSS_ATTENTION, GroupKind.OTHER}
DOCUMENT = [*range(100, 152)]
TAIL = [7, 7, 7]


def info(*specs: KVCacheSpec) -> EngineInfo:
    return Mix(lambda n: specs).info(num_blocks=99, max_model_len=64)


def test_every_kind_is_one_or_the_other() -> None:
    served = {group.kind for spec in SERVED.values() for group in info(spec).groups}
    assert served | REFUSED == set(GroupKind)
    assert not served & REFUSED


@pytest.mark.parametrize(
    "names",
    [*((name,) for name in SERVED if "sink" not in name), *combinations(SERVED, 2)],
    ids="+".join,
)
def test_a_model_of_any_served_kinds_is_served(names: tuple[str, ...]) -> None:
    specs = tuple(SERVED[name] for name in names)
    assert not unserved(info(*specs))
    if "full with a sink" in names:
        return  # whose sink tokens no toy model has
    lab = HybridLab(Mix(lambda n: specs))
    lab.serve(DOCUMENT)
    lab.forget_local()
    question = [*DOCUMENT, *TAIL]
    assert Prefill(lab.mix, 52, 16).offers(question, 52) == 52
    # Of chunks alone, those before the last one are a hit of nothing.
    hit = lab.kv.find_computed_blocks(lab.request_of(question))[1]
    assert lab.witness.credited[lab.serve(question, 3)] == [52 - hit]
    lab.drain()


@pytest.mark.parametrize("kind", sorted(REFUSED))
@pytest.mark.parametrize("name", SERVED)
def test_a_model_with_another_kind_is_refused_by_its_name(
    kind: GroupKind, name: str
) -> None:
    engine = info(SERVED[name], cross())
    groups = (engine.groups[0], replace(engine.groups[1], kind=kind))
    engine = replace(engine, groups=groups)
    assert kind.value in unserved(engine)
    with pytest.raises(ConfigError, match=kind.value):
        OffloadScheduler(engine, OffloadConfig(cpu_bytes_to_use=10**6))


@pytest.mark.parametrize("kind", sorted(GroupKind))
def test_a_group_that_cannot_be_found_again_is_left_alone(kind: GroupKind) -> None:
    engine = info(full(), cross(16))
    scratch = replace(engine.groups[1], kind=kind, reusable=False)
    engine = replace(engine, groups=(engine.groups[0], scratch))
    assert not unserved(engine)
    half = OffloadScheduler(engine, OffloadConfig(cpu_bytes_to_use=10**6))
    assert [pool.groups for pool in half.host_pools] == [[0]]
    assert [cut.index for cut in chunkings(engine, 1)] == [0]
    nothing = replace(engine, groups=(scratch,))
    assert unserved(nothing)
