"""Override, environment, connectors, default: in this order, and no one unheard."""

import logging
from typing import Any

import pytest

from kvplugin.errors import ConfigError
from kvplugin.worker.backend_table import BACKENDS
from kvplugin.worker.layout_choice import (
    ENVIRONMENT_KEY,
    Decider,
    LayoutWish,
    choose_layout,
)

FLASH = {"a": BACKENDS["FLASH_ATTN"]}
TRITON = {"a": BACKENDS["FLASH_ATTN"], "b": BACKENDS["TRITON_ATTN"]}
NHD, HND = {ENVIRONMENT_KEY: "NHD"}, {ENVIRONMENT_KEY: "HND"}
WISH = (LayoutWish("nixl", "HND"),)


@pytest.mark.parametrize(
    ("override", "environment", "wishes", "layout", "decider"),
    [
        ("NHD", HND, (), "LBNHC", Decider.OVERRIDE),
        ("HND", NHD, WISH, "LBHNC", Decider.OVERRIDE),
        ("HND", {ENVIRONMENT_KEY: "garbage"}, (), "LBHNC", Decider.OVERRIDE),
        (None, HND, WISH, "LBHNC", Decider.ENVIRONMENT),
        (None, HND, (), "LBHNC", Decider.ENVIRONMENT),
        (None, {}, WISH, "LBHNC", Decider.CONNECTOR),
        (None, {ENVIRONMENT_KEY: ""}, WISH, "LBHNC", Decider.CONNECTOR),
        (None, {}, (LayoutWish("a", None), *WISH), "LBHNC", Decider.CONNECTOR),
        (None, {}, (LayoutWish("a", "LBHNC"), *WISH), "LBHNC", Decider.CONNECTOR),
        (None, {}, (LayoutWish("mla", None),), "LBNHC", Decider.DEFAULT),
        (None, {}, (), "LBNHC", Decider.DEFAULT),
    ],
)
def test_precedence(
    override: str | None,
    environment: dict[str, str],
    wishes: tuple[LayoutWish, ...],
    layout: str,
    decider: Decider,
) -> None:
    choice = choose_layout(
        FLASH, override=override, environment=environment, wishes=wishes
    )
    assert (choice.layout, choice.decided_by) == (layout, decider)
    assert choice.candidates == ("LBNHC", "LBHNC")


@pytest.mark.parametrize(
    ("override", "environment", "words"),
    [
        (
            "NHD",
            HND,
            "the override asks for KV cache layout NHD (LBNHC), but connector nixl "
            "requires HND (LBHNC): set the override to HND, or drop it, or use another "
            "connector",
        ),
        (
            None,
            NHD,
            "VLLM_KV_CACHE_LAYOUT=NHD asks for KV cache layout NHD (LBNHC), but "
            "connector nixl requires HND (LBHNC): set VLLM_KV_CACHE_LAYOUT=HND, or "
            "unset it, or use another connector",
        ),
    ],
)
def test_nobody_overrules_what_a_connector_requires(
    override: str | None, environment: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        choose_layout(FLASH, override=override, environment=environment, wishes=WISH)
    assert str(raised.value) == words


def test_process_environment_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT_KEY, "HND")
    assert choose_layout(FLASH).decided_by is Decider.ENVIRONMENT


def test_default_is_what_all_backends_read() -> None:
    cpu = {"a": BACKENDS["CPU_ATTN@0.32"]}
    assert choose_layout(cpu, environment={}).layout == "LBHNC"
    sm100 = {"a": BACKENDS["FLASHINFER_SM100"], "b": BACKENDS["FLASHMLA"]}
    assert choose_layout(sm100, environment={}).layout == "LBHNC"
    assert choose_layout({}, environment={}).layout == "LBNHC"


def test_layers_together() -> None:
    def layout(name: str) -> str:
        environment = {ENVIRONMENT_KEY: name}
        return choose_layout(FLASH, environment=environment, cross_layer=True).layout

    assert (layout("NHD"), layout("HND"), layout("")) == ("BLNHC", "BHLNC", "BLNHC")
    mla = {"m": BACKENDS["FLASHMLA"]}
    with pytest.raises(ConfigError, match=r"suits all.*FLASHMLA \(m\) LBNHC, LBHNC"):
        choose_layout(mla, environment={}, cross_layer=True)


def test_layers_of_one_kind_lie_together_if_somebody_says_so() -> None:
    named = {ENVIRONMENT_KEY: "BHLNC"}
    assert choose_layout(FLASH, environment=named, one_kind=True).layout == "BHLNC"
    assert choose_layout(FLASH, environment={}, one_kind=True).layout == "LBNHC"
    with pytest.raises(ConfigError, match=r"These would work: LBNHC, LBHNC\."):
        choose_layout(FLASH, environment=named)


def test_pages_of_different_shapes_need_blocks_in_one_run() -> None:
    fused = {"a": BACKENDS["FLASH_ATTN@0.32"]}
    assert "LHBNC" in choose_layout(fused, environment={}).candidates
    choice = choose_layout(fused, environment={}, mixed_pages=True)
    assert choice.candidates == ("LBNHC", "LBHNC")


@pytest.mark.parametrize(
    ("override", "environment", "wishes", "who"),
    [
        ("HND", {}, (), "the override asks for KV cache layout HND (LBHNC)"),
        (None, HND, (), "VLLM_KV_CACHE_LAYOUT=HND asks for"),
        (None, {}, WISH, "connector nixl asks for KV cache layout HND"),
    ],
)
def test_refusal_says_who_asked_for_what_and_what_would_work(
    override: str | None,
    environment: dict[str, str],
    wishes: tuple[LayoutWish, ...],
    who: str,
) -> None:
    with pytest.raises(ConfigError) as raised:
        choose_layout(TRITON, override=override, environment=environment, wishes=wishes)
    message = str(raised.value)
    assert message.startswith(who)
    assert "TRITON_ATTN (b) LBNHC, BLNHC" in message
    assert message.endswith("These would work: LBNHC.")


@pytest.fixture
def log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    return caplog


def prefers(connector: str, layout: str) -> LayoutWish:
    return LayoutWish(connector, layout, required=False)


@pytest.mark.parametrize(
    ("environment", "wishes", "layout", "decider", "lost"),
    [
        # Preferences that disagree: the first one that suits.
        (
            {},
            [prefers("a", "HND"), prefers("b", "NHD"), prefers("c", "NHD")],
            "LBHNC",
            Decider.CONNECTOR,
            ["b asks for KV cache layout NHD (LBNHC), but LBHNC", "c asks for"],
        ),
        ({}, [prefers("a", "HND"), prefers("b", "HND")], "LBHNC", "connector", []),
        # A requirement, the environment: whoever is firm.
        (
            {},
            [prefers("a", "NHD"), LayoutWish("b", "HND")],
            "LBHNC",
            Decider.CONNECTOR,
            ["a asks for KV cache layout NHD (LBNHC), but LBHNC was chosen by connect"],
        ),
        (
            NHD,
            [prefers("a", "HND")],
            "LBNHC",
            Decider.ENVIRONMENT,
            ["a asks for KV cache layout HND (LBHNC), but LBNHC was chosen by environ"],
        ),
        # One that cannot be, or does not exist.
        (
            {},
            [prefers("a", "LHBNC")],
            "LBNHC",
            "default",
            ["a asks for KV cache layout LHBNC, w"],
        ),
        (
            {},
            [prefers("a", "HDN"), prefers("b", "HND")],
            "LBHNC",
            Decider.CONNECTOR,
            ["unknown KV cache layout 'HDN' in connector a. Did"],
        ),
    ],
)
def test_a_preference_never_ends_the_start(
    environment: dict[str, str],
    wishes: list[LayoutWish],
    layout: str,
    decider: str,
    lost: list[str],
    log: pytest.LogCaptureFixture,
) -> None:
    choice = choose_layout(FLASH, environment=environment, wishes=wishes)
    assert (choice.layout, choice.decided_by) == (layout, decider)
    assert len(log.messages) == len(lost)
    for words, message in zip(lost, log.messages, strict=True):
        assert words in message


def test_a_preference_that_no_backend_reads_leaves_the_default(
    log: pytest.LogCaptureFixture,
) -> None:
    wish = prefers("offload", "HND")
    choice = choose_layout(TRITON, environment={}, wishes=[wish])
    assert (choice.layout, choice.decided_by) == ("LBNHC", Decider.DEFAULT)
    assert log.text.count("connector offload asks for") == 1
    firm = LayoutWish("nixl", "HND")
    with pytest.raises(ConfigError, match="connector nixl asks"):
        choose_layout(TRITON, environment={}, wishes=[wish, firm])


def test_requirements_that_disagree_are_refused_whoever_decides() -> None:
    wishes = (*WISH, LayoutWish("offload", "NHD"), LayoutWish("x", None))
    for environment in ({}, NHD):
        with pytest.raises(ConfigError, match="nixl HND, offload NHD"):
            choose_layout(FLASH, environment=environment, wishes=wishes)


@pytest.mark.parametrize("name", ["nhdd", "LBNH"])
@pytest.mark.parametrize(
    ("asked", "who"),
    [
        (lambda name: {"environment": {ENVIRONMENT_KEY: name}}, ENVIRONMENT_KEY),
        (lambda name: {"override": name, "environment": NHD}, "the override"),
        (
            lambda name: {"wishes": [LayoutWish("nixl", name)], "environment": {}},
            "connector nixl",
        ),
    ],
)
def test_an_unknown_name_is_refused_where_it_stands(
    name: str, asked: Any, who: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        choose_layout(FLASH, **asked(name))
    message = str(raised.value)
    assert message.startswith(f"unknown KV cache layout {name!r} in {who}. ")
    assert (ENVIRONMENT_KEY in message) == (who == ENVIRONMENT_KEY)
