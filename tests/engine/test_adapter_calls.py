"""What vLLM's calls of a connector come to, without an engine: the half is a fake that
writes down what it hears."""

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.v1 import kv_cache_interface as vllm_specs

from kvplugin.contract import GroupKind, Lookup, WorkerOutcome
from kvplugin.integration.vllm.connector import PlanMetadata, ReportMetadata
from kvplugin.integration.vllm.doctor import Verdict, _failed_loads
from kvplugin.integration.vllm.failures import MATRIX, Channel, failed_loads
from kvplugin.integration.vllm.offload import (
    KVPluginOffloadConnector,
    OffloadPromMetrics,
)
from kvplugin.integration.vllm.stats import VllmStats
from kvplugin.integration.vllm.steps import step
from tests.engine.test_translate import attention, cache_config, translated


class Half:
    """Of either side: hits eight tokens, and notes what else it is asked."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, Any]] = []
        self.watched = {"a"}
        self.outcome = WorkerOutcome()

    def lookup(self, request: Any, num_local_tokens: int) -> Lookup:
        self.heard.append(("lookup", request.request_id))
        return Lookup(8)

    def distrust(self, block_ids: Any) -> None:
        self.heard.append(("distrust", block_ids))

    def apply(self, reports: Any) -> None:
        self.heard.append(("apply", list(reports)))

    def begin_step(self, plan: bytes) -> None:
        self.heard.append(("begin_step", plan))

    def poll(self) -> WorkerOutcome:
        return self.outcome


@pytest.fixture
def half() -> Half:
    return Half()


@pytest.fixture
def connector(half: Half) -> Any:
    """As after its start, with one group of full attention."""
    made: Any = object.__new__(KVPluginOffloadConnector)
    made._scheduler = made._worker = half
    made._live, made._room = {}, None
    made._kv_cache_config = cache_config(attention())
    made._channel = Channel.REQUESTS
    made._failed, made._reports = set(), []
    made._connector_metadata = PlanMetadata(b"plan", "scheduler half")
    return made


def asking(**attributes: Any) -> Any:
    wanted = {"request_id": "a", "skip_reading_prefix_cache": False}
    return SimpleNamespace(**wanted | attributes)


def test_a_hit_is_offered_as_a_load_that_takes_steps(connector):
    assert connector.get_num_new_matched_tokens(asking(), 0) == (8, True)


def test_who_must_not_read_the_cache_is_offered_nothing(connector, half):
    reader = asking(skip_reading_prefix_cache=True)
    assert connector.get_num_new_matched_tokens(reader, 0) == (0, False)
    assert half.heard == []


@pytest.mark.parametrize(("resumed", "blocks"), [(True, ()), (False, ([3, 4],))])
def test_the_row_of_one_that_resumes_is_not_taken_for_new_blocks(half, resumed, blocks):
    """`allocated` has told it; vLLM sends the row again, whole."""
    decided = SimpleNamespace(
        num_scheduled_tokens={"a": 10},
        total_num_scheduled_tokens=10,
        preempted_req_ids=None,
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=["a"],
            resumed_req_ids={"a"} if resumed else set(),
            new_block_ids=[([3, 4],)],
            num_computed_tokens=[16],
        ),
    )
    (scheduled,) = step(half, [16], decided).scheduled
    assert scheduled.new_block_ids == blocks


def test_a_newer_runner_may_say_more_when_loads_begin(connector, half):
    connector.start_load_kv(None, something_new=True)
    assert half.heard == [("begin_step", b"plan")]


def test_a_step_without_a_plan_begins_all_the_same(connector, half):
    connector._connector_metadata = None
    connector.start_load_kv(None)
    assert half.heard == [("begin_step", b"")]


def output(invalid: set[int]) -> Any:
    return SimpleNamespace(
        invalid_block_ids=invalid, kv_connector_worker_meta=ReportMetadata([b"report"])
    )


def test_blocks_that_any_connector_failed_to_load_are_distrusted_first(connector, half):
    connector.update_connector_output(output({3, 5}))
    assert half.heard == [("distrust", {3, 5}), ("apply", [b"report"])]


def test_without_failures_only_reports_are_applied(connector, half):
    connector.update_connector_output(output(set()))
    assert half.heard == [("apply", [b"report"])]


def test_failed_loads_are_said_by_block_where_that_is_the_channel(connector, half):
    half.outcome = WorkerOutcome(failed_loads={"a": (3, 5), "b": (7,)})
    connector._connector_metadata = None
    connector.get_finished(set())
    assert connector.get_block_ids_with_load_errors() == set()
    connector._channel = Channel.BLOCKS
    assert connector.get_block_ids_with_load_errors() == {3, 5, 7}


def test_groups_that_loads_fill_are_those_that_hashes_find_again(connector):
    connector._kv_cache_config = cache_config(
        attention("CrossAttentionSpec"), attention(), attention()
    )
    assert connector.get_loaded_kv_cache_group_ids(asking()) == (1, 2)


def test_no_request_is_kept_for_a_cache(connector):
    assert connector.requires_kv_delivery is False


def test_full_attention_to_the_prompt_alone_is_of_no_kind_that_is_served():
    class PromptAndWindow(vllm_specs.FullAttentionSpec):
        rswa_window = 32

    arguments = {"block_size": 16, "num_kv_heads": 2, "head_size": 8}
    spec = PromptAndWindow(**arguments, dtype=attention().dtype)
    (group,) = translated(cache_config(spec)).groups
    assert group.kind is GroupKind.OTHER


CHANNELS = {
    # (one group of full attention, our scheduler, request ids are taken)
    (True, True, True): ("0.32", Channel.BLOCKS),
    (True, False, True): ("0.32", Channel.BLOCKS),
    (False, True, True): ("0.32", Channel.REQUESTS),
    (False, False, True): ("0.32", Channel.REQUESTS),
    (True, True, False): ("0.19.1", Channel.BLOCKS),
    (True, False, False): ("0.19.1", Channel.BLOCKS),
    (False, True, False): ("0.19.1", Channel.BLOCKS),
    (False, False, False): ("0.19.1", Channel.NONE),
}


@pytest.mark.parametrize("engine", product((True, False), repeat=3))
def test_every_engine_has_its_row(engine):
    row = failed_loads(*engine)
    assert (row.vllm, row.channel) == CHANNELS[engine]
    undone = "computed" in row.recompute
    assert undone == (row.channel is not Channel.NONE)


@pytest.mark.parametrize(
    ("installed", "version"), [("0.19.1", "0.19.1"), ("0.32.0+cpu", "0.32")]
)
def test_the_doctor_tells_the_rows_of_the_installed_version(installed, version):
    rows = [row for row in MATRIX if row.vllm == version]
    findings = list(_failed_loads(installed))
    assert len(findings) == len(rows)
    for finding, row in zip(findings, rows, strict=True):
        assert row.groups in finding.subject
        assert row.scheduler.strip("`") in finding.subject
        said = f"said by {row.channel}; recompute: {row.recompute}; fail: {row.fail}"
        assert finding.detail == said
        assert (finding.verdict is Verdict.NOTE) == (row.channel is Channel.NONE)


def test_counters_are_read_in_the_same_process_as_on_the_wire():
    """0.19's `MultiConnector` does so."""
    stats = VllmStats()
    stats.data["counters"]["hits"] = 2
    assert stats["data"] is stats.data


class TwiceMetrics(OffloadPromMetrics):
    """The same table under names that no engine of this process has."""

    prefix = "test_twice_"


def test_two_connectors_of_one_class_count_in_the_same_families():
    """0.19's `MultiConnector` builds them for each."""
    types = {kind: kind for kind in (Counter, Gauge, Histogram)}
    config = SimpleNamespace(kv_transfer_config=None)
    both = [TwiceMetrics(config, types, ["engine"], {0: ["0"]}) for _ in range(2)]
    for metrics in both:
        data = VllmStats().data
        data["counters"]["hits"] = 2
        metrics.observe(data)
    assert REGISTRY.get_sample_value("test_twice_hits_total", {"engine": "0"}) == 4
