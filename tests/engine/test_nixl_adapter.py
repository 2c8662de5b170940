"""What vLLM's calls of `KVPluginNixlConnector` come to, without an engine: the half is
a fake that writes down what it hears."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from kvplugin.connector_answers import ConnectorAnswers
from kvplugin.connectors.idle import IdleScheduler, IdleWorker
from kvplugin.connectors.nixl.config import NixlConfig, Role
from kvplugin.contract import LATER, Lookup
from kvplugin.errors import ConfigError, LayoutMismatchError
from kvplugin.integration.vllm import CONNECTORS, cpu_pages
from kvplugin.integration.vllm.commands import config
from kvplugin.integration.vllm.connector import PlanMetadata
from kvplugin.integration.vllm.doctor import (
    Verdict,
    _cpu_pages,
    _huge_pages,
    _same_host,
)
from kvplugin.integration.vllm.nixl import (
    Introduction,
    KVPluginNixlConnector,
    settings_here,
)
from kvplugin.integration.vllm.peers_command import peers
from kvplugin.integration.vllm.versions import PEERS, missing_for
from tests.engine.test_translate import (
    attention,
    cache_config,
    mamba,
    translated,
)
from tests.engine.version import is_019

ENDS_WELL = ["FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"]
ENDS_OTHERWISE = ["FINISHED_ABORTED", "FINISHED_IGNORED", "FINISHED_ERROR"]


class Half:
    """A scheduler half that meets peers, and leaves one token away."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.answer = Lookup(8)

    def meet(self, introductions: Any) -> None:
        self.heard.append(("meet", dict(introductions)))

    def arrived(self, request: Any) -> int:
        self.heard.append(("arrived", request.request_id))
        return 1

    def handover(self, request: Any, block_ids: Any, num_computed_tokens: int) -> Any:
        self.heard.append(("handover", block_ids, num_computed_tokens))
        return {"remote_request_id": "lease"}

    def lookup(self, request: Any, num_local_tokens: int) -> Lookup:
        self.heard.append(("lookup", num_local_tokens))
        return self.answer

    def finished(self, request: Any) -> bool:
        self.heard.append(("finished", request.request_id))
        return True

    def has_pending_work(self) -> bool:
        return False

    def begin_step(self, plan: bytes) -> None:
        self.heard.append(("begin_step", plan))


@pytest.fixture
def half() -> Half:
    return Half()


@pytest.fixture
def connector(half: Half) -> Any:
    """As after its start, with one group of full attention and two ranks."""
    made: Any = object.__new__(KVPluginNixlConnector)
    made._scheduler = made._worker = half
    made._answers = ConnectorAnswers(half)
    made._live, made._room, made._origin = {}, None, "origin"
    made._kv_cache_config = cache_config(attention())
    made._kv_transfer_config = SimpleNamespace(kv_role="kv_both")
    made._vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=2, world_size=4),
        cache_config=SimpleNamespace(block_size=16),
        device_config=SimpleNamespace(device_type="cpu"),
    )
    return made


def request(**attributes: Any) -> Any:
    return SimpleNamespace(
        **{
            "request_id": "a",
            "skip_reading_prefix_cache": False,
            "kv_transfer_params": {"do_remote_decode": True},
            "prompt_token_ids": [*range(33)],
            "prompt_embeds": None,
            "_all_token_ids": [*range(33)],
            "num_prompt_tokens": 33,
            "num_computed_tokens": 33,
            "mm_features": [],
            "block_hashes": [b"0", b"1"],
            "max_tokens": 7,
            "status": SimpleNamespace(name="RUNNING"),
        }
        | attributes
    )


def test_it_is_known_by_its_name():
    assert CONNECTORS["KVPluginNixlConnector"] == KVPluginNixlConnector.__module__


def test_this_vllm_has_all_it_needs():
    assert missing_for(PEERS) == ""


def test_a_request_arrives_once_and_leaves_the_end_of_its_prompt_away(connector, half):
    one = request()
    connector.on_new_request(one)
    assert connector.get_num_new_matched_tokens(one, 16) == (8, True)
    assert connector.get_num_new_matched_tokens(one, 16) == (8, True)
    assert half.heard == [("arrived", "a"), ("lookup", 16), ("lookup", 16)]
    assert (one.num_prompt_tokens, one.max_tokens) == (32, 1)


def test_where_nobody_tells_of_new_requests_the_first_lookup_does(connector, half):
    """As in 0.19, which looks up again after a preemption."""
    one = request()
    for _ in range(2):
        connector.get_num_new_matched_tokens(one, 0)
    assert half.heard.count(("arrived", "a")) == 1
    assert one.num_prompt_tokens == 32


def test_a_local_hit_of_the_whole_shortened_prompt_is_looked_up_again(connector, half):
    """vLLM 0.19 would find that it has nothing to compute, and end."""
    one = request()
    assert connector.get_num_new_matched_tokens(one, 32) == (None, False)
    assert one.num_prompt_tokens == 32
    assert connector.get_num_new_matched_tokens(one, 16) == (8, True)
    assert half.heard == [("arrived", "a"), ("lookup", 16)]


def test_a_request_waits_while_its_producer_is_asked(connector, half):
    half.answer = LATER
    assert connector.get_num_new_matched_tokens(request(), 0) == (None, False)


@pytest.mark.parametrize("params", ["text", ["list"], 7, b"bytes"])
def test_parameters_that_are_no_table_reach_nobody(connector, params):
    """vLLM itself takes them for one."""
    one = request(kv_transfer_params=params)
    connector.on_new_request(one)
    assert one.kv_transfer_params is None


@pytest.mark.parametrize("status", ENDS_WELL)
def test_who_has_ended_well_is_handed_over(connector, half, status):
    one = request(status=SimpleNamespace(name=status))
    answer = connector.request_finished_all_groups(one, ([3, 4, 5],))
    assert answer == (True, {"remote_request_id": "lease"})
    assert half.heard == [("handover", ([3, 4, 5],), 33), ("finished", "a")]


@pytest.mark.parametrize("status", ENDS_OTHERWISE)
def test_who_has_not_is_not(connector, half, status):
    one = request(status=SimpleNamespace(name=status))
    assert connector.request_finished_all_groups(one, ([3],)) == (True, None)
    assert half.heard == [("finished", "a")]


def test_a_half_that_fails_is_not_the_engines_end(connector, half, monkeypatch):
    """Whatever a client sends: the request is computed, and not handed over."""

    def fails(*_: object) -> None:
        raise OverflowError("a client made this up")

    monkeypatch.setattr(half, "arrived", fails)
    monkeypatch.setattr(half, "handover", fails)
    one = request(status=SimpleNamespace(name=ENDS_WELL[0]))
    connector.on_new_request(one)
    assert one.num_prompt_tokens == 33
    assert connector.request_finished_all_groups(one, ([3],)) == (True, None)


def test_the_states_a_request_ends_in_are_vllms():
    from vllm.v1.request import RequestStatus

    names = {status.name for status in RequestStatus if "FINISHED" in status.name}
    assert {*ENDS_WELL, *ENDS_OTHERWISE[:2]} <= names


def test_reads_begin_with_the_plan_and_run_beside_the_forward(connector, half):
    connector.bind_connector_metadata(PlanMetadata(b"plan"))
    assert half.heard == [("begin_step", b"plan")]
    connector.start_load_kv(None)
    assert half.heard == [("begin_step", b"plan")], "once"


def test_ranks_are_counted_over_pipeline_stages(connector, half):
    said = {
        (stage, rank): Introduction(f"{stage}{rank}".encode())
        for stage in (0, 1)
        for rank in (0, 1)
    }
    connector.set_xfer_handshake_metadata_pp_aware(said)
    assert half.heard == [("meet", {0: b"00", 1: b"01", 2: b"10", 3: b"11"})]


def test_ranks_of_019_have_one_number(connector, half):
    connector.set_xfer_handshake_metadata(
        {0: Introduction(b"a"), 1: Introduction(b"b")}
    )
    assert half.heard == [("meet", {0: b"a", 1: b"b"})]


def test_what_another_connector_says_is_left_to_it(connector, half):
    connector.set_xfer_handshake_metadata_pp_aware({(0, 0): object()})
    assert half.heard == [("meet", {})]


def test_halves_that_do_nothing_meet_nobody(connector):
    connector._scheduler, connector._worker = IdleScheduler(), IdleWorker()
    connector._answers = ConnectorAnswers(connector._scheduler)
    connector.set_xfer_handshake_metadata_pp_aware({(0, 0): Introduction(b"")})
    assert connector.get_handshake_metadata() is None
    one = request(status=SimpleNamespace(name=ENDS_WELL[0]))
    assert connector.request_finished_all_groups(one, ([3],)) == (False, None)
    connector.on_new_request(one)
    assert one.num_prompt_tokens == 33


@pytest.mark.parametrize(
    ("role", "delivers"),
    [("kv_producer", True), ("kv_both", True), ("kv_consumer", False)],
)
def test_who_hands_over_must_deliver(connector, role, delivers):
    connector._kv_transfer_config.kv_role = role
    assert connector.requires_kv_delivery is delivers


@pytest.mark.parametrize(("device", "groups"), [("cpu", ()), ("cuda", (0,))])
def test_blocks_are_zeroed_before_reads_where_that_is_in_order(
    connector, device, groups
):
    connector._vllm_config.device_config.device_type = device
    assert connector.get_loaded_kv_cache_group_ids(request()) == groups


@pytest.mark.skipif(is_019(), reason="vLLM 0.19 does not ask")
def test_hits_come_from_another_engine(connector):
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    sources = connector.get_external_cache_hit_sources
    assert sources(request(), 5) == {CacheHitSource.P2P: 5}
    assert sources(request(), 0) == {}


@pytest.mark.parametrize("mla", [False, True])
def test_heads_lie_outside_of_tokens_where_there_are_heads(mla):
    """By the name that vLLM's own connector gives it: two in a `MultiConnector` must
    say the same."""
    engine = SimpleNamespace(model_config=SimpleNamespace(use_mla=mla))
    layout = "HND" if is_019() else "LBHNC"
    expected = None if mla else layout
    assert KVPluginNixlConnector.get_required_kvcache_layout(engine) == expected
    nothing = SimpleNamespace(model_config=None)
    assert KVPluginNixlConnector.get_required_kvcache_layout(nothing) is None


# -- settings --------------------------------------------------------------------------


def of_group(index: int) -> Any:
    return SimpleNamespace(data_parallel_index=index, data_parallel_rank=index)


def test_vllms_variables_count_where_a_key_is_not_set(monkeypatch):
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "10.0.0.1")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "5700")
    assert settings_here({}, of_group(0)) == {
        "side_channel_host": "10.0.0.1",
        "side_channel_port": 5700,
    }
    ours = {"side_channel_host": "127.0.0.1", "side_channel_port": 5800}
    assert settings_here(ours, of_group(0)) == ours


def test_a_variable_without_a_port_is_refused_by_name(monkeypatch):
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "five")
    with pytest.raises(ConfigError, match="VLLM_NIXL_SIDE_CHANNEL_PORT='five'"):
        settings_here({}, of_group(0))


def test_engines_of_one_group_have_ports_of_their_own(monkeypatch):
    monkeypatch.delenv("VLLM_NIXL_SIDE_CHANNEL_PORT", raising=False)
    default = NixlConfig().side_channel_port
    assert settings_here({}, of_group(3)) == {"side_channel_port": default + 3}
    given = {"side_channel_port": 5800}
    assert settings_here(given, of_group(2)) == {"side_channel_port": 5802}
    assert given == {"side_channel_port": 5800}


@pytest.mark.skipif(is_019(), reason="0.19 has other groups")
def test_states_that_vllm_does_not_keep_are_refused_by_group(connector):
    engine = translated(cache_config(attention(), mamba("none")))
    connector.engine_info = lambda epoch: engine
    with pytest.raises(ConfigError, match="group 1 is of kind mamba"):
        connector._scheduler_half(NixlConfig())


def test_context_parallelism_is_refused_by_name():
    with pytest.raises(ConfigError, match="prefill_context_parallel_size"):
        translated(cache_config(attention()), prefill_context_parallel_size=2)


def test_ranks_that_share_heads_are_told():
    engine = translated(cache_config(attention()), tensor_parallel_size=2)
    assert engine.tp_size == 2


# -- commands --------------------------------------------------------------------------


@pytest.mark.parametrize("role", [*Role])
def test_a_configuration_is_rendered(role):
    arguments = ["nixl", role.value, "side_channel_port=5700", "insecure=true"]
    rendered = json.loads(CliRunner().invoke(config, arguments).output)
    assert rendered == {
        "kv_connector": "KVPluginNixlConnector",
        "kv_role": f"kv_{role.value}",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"side_channel_port": 5700, "insecure": True},
    }


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("side_chanel_port=1", "Did you mean 'side_channel_port'"),
        ("side_channel_port=0", "side_channel_port"),
        ("side_channel_host=0.0.0.0", "secret"),
    ],
)
def test_what_the_engine_would_refuse_is_refused_when_rendered(setting, why):
    done = CliRunner().invoke(config, ["nixl", "producer", setting])
    assert isinstance(done.exception, ConfigError)
    assert why in str(done.exception)


def test_an_engine_that_is_not_there_is_said_to_be_so():
    done = CliRunner().invoke(peers, ["127.0.0.1:1", "--timeout", "5"])
    assert done.exit_code == 1
    assert "127.0.0.1:1 does not say how it is" in done.output


# -- the doctor ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scope", "verdict"), [("0", Verdict.OK), ("1", Verdict.NOTE), (None, Verdict.OK)]
)
def test_the_doctor_says_how_engines_of_a_machine_read(tmp_path, scope, verdict):
    setting = tmp_path / "ptrace_scope"
    if scope is not None:
        setting.write_text(f"{scope}\n")
    (finding,) = _same_host(setting)
    assert finding.verdict is verdict
    assert ("ptrace_scope is 1" in finding.detail) == (scope == "1")


@pytest.mark.parametrize(
    ("words", "verdict"),
    [
        ("[always] madvise never", Verdict.OK),
        ("always [madvise] never", Verdict.OK),
        ("always madvise [never]", Verdict.NOTE),
    ],
)
def test_the_doctor_says_whether_kv_can_lie_in_huge_pages(tmp_path, words, verdict):
    setting = tmp_path / "enabled"
    setting.write_text(f"{words}\n")
    (finding,) = _huge_pages(setting)
    assert finding.verdict is verdict
    assert (str(setting) in finding.detail) == (verdict is Verdict.NOTE)
    assert not list(_huge_pages(tmp_path / "none"))


def test_the_doctor_knows_this_machines_pages():
    (finding,) = _cpu_pages()
    assert finding.verdict is Verdict.OK
    assert "sizes are converted" in finding.detail


def test_the_doctor_lives_with_pages_that_nobody_knows(monkeypatch):
    def fails(kind: object) -> None:
        raise LayoutMismatchError("no regular order")

    monkeypatch.setattr(cpu_pages, "probe", fails)
    (finding,) = _cpu_pages()
    assert finding.verdict is Verdict.NOTE
    assert "no regular order" in finding.detail
