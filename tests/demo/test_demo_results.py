"""What is said about a run is what was recorded."""

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from kvplugin.integration.demo.picture import bars, draw
from kvplugin.integration.demo.report import to_json
from kvplugin.integration.demo.results import Case, Comparison, EngineRun
from kvplugin.integration.demo.table import comparison_table, verdict


def printed(comparison: Comparison) -> str:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(comparison_table(comparison))
    return capture.get()


def with_answers(run: EngineRun, **changes: object) -> EngineRun:
    """`run` with its last answer changed."""
    *first, last = run.answers
    return replace(run, answers=[*first, replace(last, **changes)])


@pytest.fixture
def different(comparison: Comparison) -> Comparison:
    """One answer of three is another text."""
    changed = with_answers(
        comparison.with_kvplugin, text="Nobody did.", token_ids=[11, 14]
    )
    return replace(comparison, with_kvplugin=changed)


@pytest.fixture
def nothing_loaded(comparison: Comparison) -> Comparison:
    return replace(comparison, with_kvplugin=comparison.without)


def test_cases_follow_from_where_the_tokens_came_from(comparison: Comparison) -> None:
    cases = [[a.case, b.case] for a, b in comparison.pairs]
    assert cases == [
        [Case.COLD, Case.COLD],
        [Case.LOCAL, Case.LOCAL],
        [Case.RECOMPUTED, Case.LOADED],
    ]


def test_figures_of_a_comparison(comparison: Comparison) -> None:
    assert comparison.succeeded
    assert comparison.speedup == pytest.approx(2.4 / 0.15)
    assert comparison.without.hit_rate == pytest.approx(3840 / (3 * 3939))
    assert comparison.with_kvplugin.hit_rate == pytest.approx(2 * 3840 / (3 * 3939))
    assert comparison.largest_logprob_gap == 0.0


def test_logprobs_are_compared_token_by_token(comparison: Comparison) -> None:
    nudged = with_answers(comparison.with_kvplugin, logprobs=[-0.1, -0.5, -0.5])
    assert replace(comparison, with_kvplugin=nudged).largest_logprob_gap == 0.25


def test_table_shows_both_engines(comparison: Comparison) -> None:
    text = printed(comparison)
    for figure in (
        "2,400 ms",
        "150 ms",
        "3,840",
        "88.5 MB",
        "4.42 GB/s",
        "65.0%",
        "2.2 s",
        "3 of 3",
        "16 times sooner",
    ):
        assert figure in text


def test_differing_answers_fail_and_are_shown(different: Comparison) -> None:
    assert not different.succeeded
    text = printed(different)
    assert "2 of 3" in text
    assert "without: Ines Kallio moved it." in text
    assert "with:    Nobody did." in text


def test_a_run_that_loaded_nothing_fails(nothing_loaded: Comparison) -> None:
    assert not nothing_loaded.succeeded
    assert "No document was loaded" in verdict(nothing_loaded)


def test_runs_of_unequal_length_cannot_be_compared(comparison: Comparison) -> None:
    short = replace(comparison.without, answers=comparison.without.answers[:1])
    with pytest.raises(ValueError, match="zip"):
        _ = replace(comparison, without=short).pairs


def test_json_has_the_figures_and_the_answers(comparison: Comparison) -> None:
    report = json.loads(to_json(comparison))
    assert report["succeeded"] is True
    assert report["answers"] == 3
    assert report["without"]["ttft_median_s"]["recomputed"] == 2.4
    assert report["with"]["loaded_tokens"] == 3840
    assert report["with"]["answers"][2]["case"] == "loaded"


def test_picture_files_are_an_svg_and_a_png(
    comparison: Comparison, tmp_path: Path
) -> None:
    svg, png = draw(comparison, tmp_path)
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")  # noqa: S314
    assert png.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_picture_leaves_out_what_did_not_happen(nothing_loaded: Comparison) -> None:
    names = [bar.name for bar in bars(nothing_loaded)]
    assert names == ["Cold", "Recomputed", "Local hit"]


def test_a_busy_machine_is_mentioned(comparison: Comparison) -> None:
    assert comparison.steady
    assert "something else" not in printed(comparison)
    slow = with_answers(comparison.without, visit=0, ttft_s=9.0)
    busy = replace(comparison, without=slow)
    assert not busy.steady
    assert "something else" in printed(busy)
