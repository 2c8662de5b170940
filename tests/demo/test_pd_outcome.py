"""What `demo pd` reads from metrics, and what it makes of its answers."""

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from rich.console import Console

from kvplugin.connectors.nixl.metrics import METRICS
from kvplugin.integration.demo.pd.metrics import SAMPLES, Moved, moved, settled
from kvplugin.integration.demo.pd.results import Case, Outcome
from kvplugin.integration.demo.pd.table import outcome_table, to_json, verdict

STATS = "kv_transfer/kv_connector/v1/nixl/stats.py"
"""Of vLLM, below `distributed`."""
PAGE = """\
# HELP vllm:kvplugin_nixl_read_bytes_total Bytes that they moved, all ranks.
# TYPE vllm:kvplugin_nixl_read_bytes_total counter
vllm:kvplugin_nixl_read_bytes_total{engine="0",model_name="m"} 3e+06
vllm:kvplugin_nixl_read_bytes_total{engine="1",model_name="m"} 1e+06
# HELP vllm:kvplugin_nixl_read_bytes_created when
# TYPE vllm:kvplugin_nixl_read_bytes_created gauge
vllm:kvplugin_nixl_read_bytes_created{engine="0",model_name="m"} 1.7e+09
# HELP vllm:kvplugin_nixl_read_seconds Seconds of a read.
# TYPE vllm:kvplugin_nixl_read_seconds histogram
vllm:kvplugin_nixl_read_seconds_bucket{engine="0",le="0.1",model_name="m"} 2.0
vllm:kvplugin_nixl_read_seconds_bucket{engine="0",le="+Inf",model_name="m"} 2.0
vllm:kvplugin_nixl_read_seconds_count{engine="0",model_name="m"} 2.0
vllm:kvplugin_nixl_read_seconds_sum{engine="0",model_name="m"} 0.002
"""


def test_bytes_and_seconds_are_summed_over_engines() -> None:
    found = moved(PAGE, SAMPLES["KVPluginNixlConnector"])
    assert found == Moved(4_000_000, 0.002)
    assert found.gigabytes_per_second == pytest.approx(2.0)


def test_a_server_without_reads_has_moved_nothing() -> None:
    assert moved("", SAMPLES["NixlConnector"]) == Moved(0, 0.0)
    assert Moved(0, 0.0).gigabytes_per_second == 0.0


def test_the_metrics_of_both_connectors_exist() -> None:
    """Names of ours are in our table, names of vLLM's in its source."""
    spec = find_spec("vllm")  # not imported, which takes long
    assert spec is not None
    assert spec.origin is not None
    stats = Path(spec.origin).with_name("distributed") / STATS
    for name in SAMPLES["KVPluginNixlConnector"]:
        plain = name.removeprefix("vllm:kvplugin_nixl_")
        assert plain.removesuffix("_total").removesuffix("_sum") in {
            metric.name for metric in METRICS
        }
    for name in SAMPLES["NixlConnector"]:
        assert name.removesuffix("_sum") in stats.read_text()


def test_totals_are_read_until_they_have_moved() -> None:
    values = iter([Moved(5, 1.0), Moved(5, 1.0), Moved(9, 2.0), Moved(100, 3.0)])
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    found = settled(
        lambda: next(values), Moved(5, 1.0), limit_s=60, clock=lambda: now, sleep=sleep
    )
    assert found == Moved(9, 2.0)
    still = settled(
        lambda: Moved(9, 2.0), found, limit_s=60, clock=lambda: now, sleep=sleep
    )
    assert still == found
    assert now > 60


CASE = Case(
    question="Lake Orrin: Who moved the moth trap?",
    prompt_tokens=1005,
    ttft_s=0.912,
    moved=Moved(47_185_920, 0.01),
    text="Ines Kallio moved it.",
    alone="Ines Kallio moved it.",
)
UNREAD = replace(CASE, moved=Moved(0, 0.0))
OTHER = replace(CASE, alone="Tomas Brandt did.")


def shown(outcome: Outcome, width: int = 80) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(outcome_table(outcome))
    return console.export_text()


def test_a_read_prompt_with_the_same_text_is_a_success() -> None:
    outcome = Outcome(title="A run", cases=[CASE, CASE])
    assert outcome.succeeded
    (row, _) = (line for line in shown(outcome).splitlines() if "1,005" in line)
    for cell in ("912 ms", "47.2 MB", "4.72 GB/s", "yes", "Ines Kallio"):
        assert cell in row
    assert verdict(outcome).startswith("Read from the prefill server: 2 of 2 prompts.")


def test_a_prompt_that_was_not_read_is_a_failure() -> None:
    outcome = Outcome(title="A run", cases=[CASE, UNREAD])
    assert not outcome.succeeded
    assert "1 of 2 prompts" in verdict(outcome)


def test_another_text_is_a_failure_and_shown() -> None:
    outcome = Outcome(title="A run", cases=[OTHER, CASE])
    assert not outcome.succeeded
    text = shown(outcome)
    assert "NO" in text
    assert "Tomas Brandt did." in text
    assert "Same text as one server alone: 1 of 2" in verdict(outcome)


def test_nothing_asked_is_no_success() -> None:
    assert not Outcome(title="A run", cases=[]).succeeded


def test_json_has_the_figures() -> None:
    report = json.loads(to_json(Outcome(title="A run", cases=[CASE, OTHER])))
    assert report["succeeded"] is False
    assert [answer["same"] for answer in report["answers"]] == [True, False]
    assert report["answers"][0]["read_bytes"] == 47_185_920
