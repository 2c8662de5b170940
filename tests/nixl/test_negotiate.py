"""Engines agree where KV can be moved or converted; else every reason is named."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from msgspec import structs

from kvplugin.connectors.negotiate import Refusal, negotiate, pair_rank
from kvplugin.connectors.nixl.config import NixlConfig
from kvplugin.connectors.nixl.descriptor import EngineDescriptor, LayerMemory
from kvplugin.contract import GroupKind
from kvplugin.errors import LayoutMismatchError
from tests.nixl.memories import MODEL, Engine, Layer, Side

NHD, HND, CPU = "FlashInfer NHD", "FlashInfer HND", "CPU attention"


def engine(
    backend: str = NHD,
    *,
    sizes: Sequence[int] = (16,),
    kinds: Sequence[GroupKind] = (GroupKind.FULL,),
    heads: int = 8,
    tp: int = 1,
    pp: int = 1,
    layers: int = 2,
    blocks: int = 4,
    splits: Sequence[int] | None = None,
    gap: int = 0,
    **changes: object,
) -> Engine:
    """An engine with some layers of each kind."""
    made = [
        Layer(f"{group}.{i}", group, heads if kind is not GroupKind.MLA else 0, 4, 4)
        if kind is not GroupKind.MAMBA
        else Layer(f"{group}.{i}", group, 0, 0, 0, state=True)
        for group, kind in enumerate(kinds)
        for i in range(layers)
    ]
    backends = {layer.name: backend for layer in made}
    side = Side(backends, sizes, splits or [1] * len(sizes), blocks, tp, pp, 0, gap)
    return Engine(made, side, kinds, **changes)  # type: ignore[arg-type]


def summary(reader: Engine, source: Engine) -> str:
    return negotiate(reader.descriptor(), source.descriptor()).summary


def reasons(reader: EngineDescriptor, source: EngineDescriptor) -> tuple[str, ...]:
    with pytest.raises(Refusal) as refused:
        negotiate(reader, source)
    assert isinstance(refused.value, LayoutMismatchError)
    for reason in refused.value.reasons:
        assert reason in str(refused.value)
    return refused.value.reasons


# -- what is agreed --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reader", "source", "line"),
    [
        ({}, {}, "2 layers moved as they are"),
        ({"blocks": 7}, {}, "2 layers moved as they are"),
        ({"tp": 2}, {"tp": 2}, "2 layers moved as they are"),
        (
            {"sizes": [128]},
            {"sizes": [64]},
            "2 layers converted, blocks of 64 tokens to 128",
        ),
        (
            {"backend": HND, "sizes": [128]},
            {"sizes": [64]},
            "2 layers converted, blocks of 64 tokens to 128, FlashInfer NHD to "
            "FlashInfer HND",
        ),
        (
            {"backend": HND, "tp": 2},
            {"backend": NHD, "heads": 8},
            "2 layers converted, FlashInfer NHD to FlashInfer HND, heads 0-3 of 8 from "
            "rank 0",
        ),
        (
            {},
            {"tp": 2},
            "2 layers converted, heads 0-3 of 8 from rank 0, heads 4-7 of 8 from "
            "rank 1",
        ),
        (
            {"heads": 1, "tp": 2},
            {"heads": 1, "tp": 4},
            "2 layers moved as they are, head 0 of 1 from rank 0",
        ),
        (
            {"kinds": [GroupKind.FULL, GroupKind.MAMBA], "sizes": [32, 256]},
            {"kinds": [GroupKind.FULL, GroupKind.MAMBA], "sizes": [64, 256]},
            "2 layers converted, blocks of 64 tokens to 32; 2 layers moved as they are",
        ),
    ],
)
def test_agreements(
    reader: dict[str, object], source: dict[str, object], line: str
) -> None:
    assert summary(engine(**reader), engine(**source)) == line  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", [NHD, HND, CPU])
@pytest.mark.parametrize("sizes", [(32, 16), (16, 32), (96, 64), (64, 96)])
def test_other_block_sizes(backend: str, sizes: tuple[int, int]) -> None:
    """Scenario 55: a producer with blocks of 32 tokens and a consumer with 16."""
    there, here = (engine(backend, sizes=[size]) for size in sizes)
    assert summary(here, there) == (
        f"2 layers converted, blocks of {sizes[0]} tokens to {sizes[1]}"
    )
    for pairing in pair_rank(here.descriptor(), here.rank(0), there.descriptor()):
        assert pairing.conversion is not None
        assert pairing.conversion.source.pool_tokens == sizes[0]
        assert pairing.conversion.target.pool_tokens == sizes[1]


def test_kernels_that_split_blocks_otherwise() -> None:
    """Equal blocks of the pool, of unequal kernel blocks, are not the same bytes."""
    here, there = engine(HND, splits=[2]), engine(HND, splits=[4])
    assert summary(here, there) == "2 layers converted"
    assert summary(here, engine(HND, splits=[2])) == "2 layers moved as they are"


def remote_ranks(here: Engine, there: Engine) -> list[list[int]]:
    """Of each of our ranks: whom its first layer is read from."""
    found = []
    for rank in range(len(here.caches)):
        pairs = pair_rank(here.descriptor(), here.rank(rank), there.descriptor())
        first = pairs[0].layer
        found.append([pair.remote_rank for pair in pairs if pair.layer == first])
    return found


@pytest.mark.parametrize(
    ("heads", "there", "here", "ranks"),
    [
        (8, 4, 2, [[0, 1], [2, 3]]),
        (8, 2, 4, [[0], [0], [1], [1]]),
        (2, 4, 1, [[0, 2]]),
        (2, 4, 4, [[0], [1], [2], [3]]),
        (1, 4, 8, [[0], [1], [2], [3], [0], [1], [2], [3]]),
    ],
)
def test_who_reads_whom(
    heads: int, there: int, here: int, ranks: list[list[int]]
) -> None:
    sides = engine(heads=heads, tp=there), engine(heads=heads, tp=here)
    assert remote_ranks(sides[1], sides[0]) == ranks


def test_readers_spread_over_copies_of_a_latent() -> None:
    there, here = (engine("MLA", kinds=[GroupKind.MLA], tp=tp) for tp in (2, 4))
    assert remote_ranks(here, there) == [[0], [1], [0], [1]]
    assert remote_ranks(there, here) == [[0], [1]]
    assert summary(here, there) == "2 layers moved as they are, from rank 0"


def test_a_layer_is_read_from_the_stage_that_has_it() -> None:
    there, here = engine(tp=2, pp=2), engine(tp=2)
    pairs = pair_rank(here.descriptor(), here.rank(1), there.descriptor())
    assert [(p.layer, p.remote_rank) for p in pairs] == [("0.0", 1), ("0.1", 3)]
    pairs = pair_rank(there.descriptor(), there.rank(2), here.descriptor())
    assert [(p.layer, p.remote_rank) for p in pairs] == [("0.1", 0)]
    assert summary(there, here) == summary(here, there) == "2 layers moved as they are"


def test_one_rank_is_enough_to_pair_it() -> None:
    """What a worker knows of its own engine."""
    there, here = engine(tp=2, pp=2), engine(HND, tp=4)
    whole = here.descriptor()
    for rank in range(4):
        own = here.rank(rank)
        alone = structs.replace(whole, ranks=[own])
        pairs = pair_rank(alone, own, there.descriptor())
        assert pairs == pair_rank(whole, own, there.descriptor())
        assert {pair.layer for pair in pairs} == {"0.0", "0.1"}


# -- what is refused -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "here", "there", "change"),
    [
        ("name", "a/model", "/models/model", "model_name"),
        ("revision", "main", "abc", "--revision"),
        ("dtype", "bfloat16", "float16", "--dtype"),
        ("quantization", "fp8", "", "--quantization"),
        ("weight_epoch", 1, 2, "weight_epoch"),
    ],
)
def test_other_models(field: str, here: object, there: object, change: str) -> None:
    sides = [
        engine(model=replace(MODEL, **{field: value})).descriptor()
        for value in (here, there)
    ]
    (reason,) = reasons(*sides)
    assert f"model {field}: {here!r} here, {there!r} there" in reason
    assert change in reason


def test_a_name_to_agree_on() -> None:
    sides = [
        engine(model=replace(MODEL, name=name)).descriptor(
            NixlConfig(model_name="ours", weight_epoch=3)
        )
        for name in ("a/model", "/models/model")
    ]
    assert sides[0].model.name == "ours"
    assert sides[0].model.weight_epoch == 3
    negotiate(*sides)


def test_drafts_on_one_side() -> None:
    """Scenario 56: a group of draft layers that the other engine has not."""
    with_drafts = engine(kinds=[GroupKind.FULL] * 3, sizes=[16] * 3).descriptor()
    groups = list(with_drafts.groups)
    groups[2] = structs.replace(groups[2], has_drafter=True, extra_history=1)
    with_drafts = structs.replace(with_drafts, groups=groups)
    without = engine(kinds=[GroupKind.FULL] * 2, sizes=[16] * 2).descriptor()
    for sides, where in (
        ((with_drafts, without), "here and not there"),
        ((without, with_drafts), "there and not here"),
    ):
        found = reasons(*sides)
        assert found[0] == (
            f"layers 2.0, 2.1 (of a drafter) are {where}: start both with one "
            "--speculative-config, or both without"
        )
        counts = len(sides[0].groups), len(sides[1].groups)
        assert f"{counts[0]} here, {counts[1]} there" in found[1]


def test_a_drafter_in_the_same_layers() -> None:
    here = engine().descriptor()
    group = structs.replace(here.groups[0], has_drafter=True, extra_history=2)
    (reason,) = reasons(structs.replace(here, groups=[group]), engine().descriptor())
    assert "'drafter, 2 tokens kept for drafts' here" in reason
    assert "'no drafter, 0 tokens kept for drafts' there" in reason
    assert "--speculative-config" in reason


def test_history_for_drafts() -> None:
    """Who keeps less than the other needs could never serve it."""
    less = engine().descriptor()
    groups = [structs.replace(less.groups[0], extra_history=3)]
    more = structs.replace(less, groups=groups)
    negotiate(less, more)
    (reason,) = reasons(more, less)
    assert "3 tokens kept for drafts' here" in reason


def test_layers_on_one_side() -> None:
    (reason,) = reasons(engine(layers=6).descriptor(), engine().descriptor())
    assert reason.startswith("layers 0.2, 0.3, 0.4 and 1 more are here and not there")


def test_layers_in_other_groups() -> None:
    kinds = [GroupKind.FULL, GroupKind.FULL]
    here = engine(kinds=kinds, sizes=[16, 16])
    layers = [replace(layer, group=1 - layer.group) for layer in here.layers]
    there = Engine(layers, here.side, kinds)
    (reason,) = reasons(here.descriptor(), there.descriptor())
    assert "groups of layers 0.0, 0.1, 1.0 and 1 more" in reason
    assert "[0, 1] here, [0, 1] there" in reason
    with pytest.raises(Refusal, match=r"layers 0.0, 0.1, 1.0 and 1 more are here"):
        pair_rank(here.descriptor(), here.rank(0), there.descriptor())


def test_other_kinds_and_windows() -> None:
    sides = [
        engine(kinds=[GroupKind.SLIDING_WINDOW], windows=[w]).descriptor()
        for w in (4096, 1024)
    ]
    (reason,) = reasons(*sides)
    assert "group 0, window: 4096 here, 1024 there" in reason
    (reason,) = reasons(sides[0], engine().descriptor())
    assert "group 0, kind: 'sliding_window' here, 'full' there" in reason


@pytest.mark.parametrize("kind", [GroupKind.CROSS_ATTENTION, GroupKind.OTHER])
def test_kinds_that_nobody_hands_over(kind: GroupKind) -> None:
    side = engine(kinds=[kind]).descriptor()
    (reason,) = reasons(side, side)
    assert f"group 0 is of kind '{kind.value}'" in reason


def changed(
    engine: Engine, change: Callable[[LayerMemory], LayerMemory]
) -> EngineDescriptor:
    made = engine.descriptor()
    ranks = [
        structs.replace(rank, layers=[change(layer) for layer in rank.layers])
        for rank in made.ranks
    ]
    return structs.replace(made, ranks=ranks)


def without_rows(layer: LayerMemory) -> LayerMemory:
    return structs.replace(layer, rows=None)


def test_pages_that_nobody_knows_the_inside_of() -> None:
    here = changed(engine(), without_rows)
    agreed = negotiate(here, changed(engine(blocks=9), without_rows))
    assert agreed.summary == "2 layers moved as they are"
    # One side's knowledge is not enough to convert.
    for source, what, change in (
        (
            changed(engine(sizes=[32]), without_rows),
            "block size: 16 here, 32 there",
            "",
        ),
        (engine(sizes=[32]).descriptor(), "block size: 16 here, 32 there", "not known"),
        (changed(engine(tp=2), without_rows), "ranks: 1 here, 2 there", "one --tensor"),
        (
            changed(engine(HND), without_rows),
            "inside of a page: 'FlashInfer NHD uint16' here, 'FlashInfer HND uint16'",
            "--kv-cache-dtype",
        ),
    ):
        found = reasons(here, source)
        assert any(what in reason and change in reason for reason in found), found
        assert all(reason.startswith("layers 0.0, 0.1: ") for reason in found)


def test_pages_without_a_name() -> None:
    nameless = changed(
        engine(), lambda layer: structs.replace(without_rows(layer), interior="")
    )
    (reason,) = reasons(nameless, nameless)
    assert "what is inside a page has no name, neither here nor there" in reason
    # Known rows need none.
    rows = changed(engine(), lambda layer: structs.replace(layer, interior=""))
    assert negotiate(rows, rows).summary == "2 layers converted"


def test_equal_names_do_not_hide_another_order_of_rows() -> None:
    """An adapter that forgot the layout in the name must not give wrong text."""
    here, there = (
        changed(engine(name), lambda layer: structs.replace(layer, interior="same"))
        for name in (NHD, HND)
    )
    assert (
        "converted, FlashInfer HND to FlashInfer NHD" in negotiate(here, there).summary
    )


def test_bytes_of_a_page_that_are_no_rows() -> None:
    """Scales inside a page move with it, and it is not taken apart."""

    def widen(layer: LayerMemory) -> LayerMemory:
        (run,) = layer.runs
        wider = run._replace(nbytes=run.nbytes + 64, stride=run.stride + 64)
        return structs.replace(layer, runs=[wider], page_bytes=layer.page_bytes + 64)

    here = changed(engine(), widen)
    assert negotiate(here, here).summary == "2 layers moved as they are"
    (reason,) = reasons(here, changed(engine(sizes=[32]), widen))
    assert "block size: 16 here, 32 there" in reason
    assert "rows are 2048 of a page's 2112 bytes" in reason


def test_pages_of_other_sizes() -> None:
    def pad(layer: LayerMemory) -> LayerMemory:
        return structs.replace(without_rows(layer), page_bytes=layer.page_bytes + 512)

    (reason,) = reasons(changed(engine(), without_rows), changed(engine(), pad))
    assert (
        "bytes of a page, and of its runs: (2048, [2048]) here, (2560, [2048])"
        in reason
    )


def test_other_dtypes_and_heads() -> None:
    def float8(layer: LayerMemory) -> LayerMemory:
        assert layer.rows is not None
        return structs.replace(layer, rows=replace(layer.rows, dtype="fp8"))

    (reason,) = reasons(engine(HND).descriptor(), changed(engine(), float8))
    assert "KV dtype: 'uint16' here, 'fp8' there" in reason
    assert "--kv-cache-dtype" in reason
    (reason,) = reasons(engine().descriptor(), engine(heads=4).descriptor())
    assert "KV heads: 8 here, 4 there" in reason


def test_other_packings() -> None:
    def packed(layer: LayerMemory) -> LayerMemory:
        assert layer.rows is not None
        rows = replace(layer.rows, packing="amx")
        return structs.replace(layer, rows=rows, interior="amx")

    (reason,) = reasons(engine(CPU).descriptor(), changed(engine(CPU), packed))
    assert "packing of rows: '' of 1 tokens here, 'amx' of 1 there" in reason
    assert "instruction set" in reason
    assert (
        "converted"
        in negotiate(
            changed(engine(CPU), packed), changed(engine(CPU, sizes=[32]), packed)
        ).summary
    )


def test_rows_that_do_not_become_each_other() -> None:
    """Transposed keys into plain ones: three loops around an element."""
    (reason,) = reasons(engine(HND).descriptor(), engine(CPU).descriptor())
    assert "KV blocks can't be converted" in reason
    assert "nested strides" in reason


def test_every_reason_at_once() -> None:
    kinds = [GroupKind.FULL, GroupKind.MAMBA]
    here = engine(kinds=kinds, sizes=[16, 8], model=replace(MODEL, revision="1"))
    there = engine(
        kinds=kinds,
        sizes=[16, 16],
        tp=2,
        layers=3,
        heads=4,
        model=replace(MODEL, name="other"),
    )
    found = reasons(here.descriptor(), there.descriptor())
    for part in (
        "model name",
        "model revision",
        "layers 0.2, 1.2 are there and not here",
        "layers 0.0, 0.1: KV heads: 8 here, 4 there",
        "layers 1.0, 1.1: block size: 8 here, 16 there",
    ):
        assert any(part in reason for reason in found), (part, found)
    assert len(found) == 5
