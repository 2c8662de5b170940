"""Override, environment, connectors, default: in this order, and no one unheard."""

import logging

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
        ("NHD", HND, WISH, "LBNHC", Decider.OVERRIDE),
        ("HND", NHD, (), "LBHNC", Decider.OVERRIDE),
        (None, NHD, WISH, "LBNHC", Decider.ENVIRONMENT),
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


def test_mere_preference_is_dropped_with_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    wish = LayoutWish("offload", "HND", required=False)
    choice = choose_layout(TRITON, environment={}, wishes=[wish])
    assert (choice.layout, choice.decided_by) == ("LBNHC", Decider.DEFAULT)
    assert "connector offload asks for" in caplog.text
    firm = LayoutWish("nixl", "HND")
    with pytest.raises(ConfigError, match="connector nixl asks"):
        choose_layout(TRITON, environment={}, wishes=[wish, firm])


def test_connectors_that_disagree_are_refused_whoever_decides() -> None:
    wishes = (*WISH, LayoutWish("offload", "NHD"), LayoutWish("x", None))
    for environment in ({}, NHD):
        with pytest.raises(ConfigError, match="nixl HND, offload NHD"):
            choose_layout(FLASH, environment=environment, wishes=wishes)


@pytest.mark.parametrize("name", ["nhdd", "LBNH"])
def test_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown KV cache layout '{name}'"):
        choose_layout(FLASH, environment={ENVIRONMENT_KEY: name})
