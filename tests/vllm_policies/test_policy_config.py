"""Settings of policies in vLLM: read, refused, rendered; and the requests' own."""

import json
import shlex
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from kvplugin.errors import ConfigError
from kvplugin.integration.vllm.commands import config
from kvplugin.integration.vllm.policy_config import (
    SCHEDULER_CLASS,
    PolicyConfig,
    read_policy_config,
)
from kvplugin.integration.vllm.recorder import Recorder
from kvplugin.integration.vllm.request_hints import HintReader
from kvplugin.policies.eviction import LRU, BlockContext
from kvplugin.replay.formats import read_trace
from kvplugin.replay.record import TraceWriter


def read(**settings: Any) -> PolicyConfig:
    return read_policy_config({"kvplugin": settings})


@pytest.mark.parametrize("nothing", [{}, {"kvplugin": {}}, {"other": 1}, object()])
def test_nothing_configured_is_vllms_own(nothing):
    settings = read_policy_config(nothing)
    hooks = settings.hooks()
    assert settings == PolicyConfig()
    assert type(settings.make_eviction_policy(hooks, 9)) is LRU
    assert not any((hooks.orders_waiting, hooks.chooses_admission))
    assert not hooks.chooses_victim


def test_what_is_named_is_asked():
    hooks = read(
        waiting_order="cached_first",
        admission="free_share",
        admission_options={"share": 0.5},
        victim="most_blocks",
    ).hooks()
    assert hooks.orders_waiting
    assert hooks.chooses_admission
    assert hooks.chooses_victim


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"victm": "last"}, "unknown key 'victm' .* Did you mean 'victim'"),
        ({"victim": "lst"}, "'lst' in victim.* Did you mean 'last'"),
        ({"eviction_policy": "lur"}, "'lur' in eviction_policy.* Did you mean 'lru'"),
        ({"eviction_policy_options": {"a": 1}}, "takes no options, got a in eviction_"),
        ({"admission_options": {"share": 1}}, "got share in admission_options"),
        ({"admission": "free_share", "admission_options": {"share": 2}}, "share=2"),
        ({"on_start_error": "ignore"}, "on_start_error"),
        ({"record_trace": 3}, "record_trace"),
        ({"eviction_policy": ""}, "eviction_policy is empty"),
        ({"record_trace": ""}, "record_trace is empty"),
        (["lru"], "must be a table"),
        ([], "must be a table"),
        (False, "must be a table"),
    ],
)
def test_what_is_wrong_is_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        read_policy_config({"kvplugin": settings})


def run(*arguments: str) -> Any:
    return CliRunner().invoke(config, ["policies", *arguments])


def test_the_command_renders_options_that_a_shell_understands():
    result = run("eviction_policy=retention+lru", "victim=least_work")
    assert shlex.split(result.output) == [
        "--scheduler-cls",
        SCHEDULER_CLASS,
        "--additional-config",
        json.dumps(
            {
                "kvplugin": {
                    "eviction_policy": "retention+lru",
                    "victim": "least_work",
                }
            }
        ),
    ]


def test_the_command_renders_arguments_in_json():
    assert json.loads(
        run("--json", "admission_options={}", "admission=open").output
    ) == {
        "scheduler_cls": SCHEDULER_CLASS,
        "additional_config": {
            "kvplugin": {"admission_options": {}, "admission": "open"}
        },
    }


def test_the_command_refuses_what_the_engine_would():
    result = run("eviction_polcy=lru")
    assert isinstance(result.exception, ConfigError)
    assert "Did you mean 'eviction_policy'" in str(result.exception)


def request_with(extra_args: Any, kv_transfer_params: Any = None) -> Any:
    return SimpleNamespace(
        request_id="r",
        sampling_params=SimpleNamespace(extra_args=extra_args),
        kv_transfer_params=kv_transfer_params,
        cache_salt=None,
        lora_request=None,
    )


def test_hints_become_the_block_context():
    request = request_with({"kvplugin": {"priority": 4, "ttl_s": 60}})
    HintReader().read(request, 100.0)
    assert request.block_context.priority == 4
    assert request.block_context.expires_at == 160.0


@pytest.mark.parametrize(
    ("hints", "session"),
    [(None, "theirs"), ({"priority": 4}, "theirs"), ({"session": "ours"}, "ours")],
)
def test_the_session_of_vllm_counts_where_hints_name_none(hints, session):
    request = request_with(hints and {"kvplugin": hints})
    request.session_id = "theirs"
    HintReader().read(request, 100.0)
    assert request.block_context.session.endswith(f":{session}")


@pytest.mark.parametrize(
    ("extra_args", "params"),
    [
        (None, None),
        ({}, {}),
        ({"kvplugin": {"priorty": 1}}, None),
        ({"kvplugin": "{"}, None),
        ({"kvplugin": 1}, None),
        (["kvplugin"], None),
        (None, {"kvplugin": [1]}),
    ],
)
def test_no_hints_and_bad_hints_leave_no_context(extra_args, params):
    request = request_with(extra_args, params)
    HintReader().read(request, 100.0)
    assert not hasattr(request, "block_context")


def test_each_mistake_is_logged_once_and_not_without_end(caplog):
    reader = HintReader()
    for i in range(100):
        for hints in (5, {f"key{i}": 1}):
            reader.read(request_with({"kvplugin": hints}), 100.0)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 16
    assert sum("of type int" in message for message in messages) == 1


def ended(**fields: Any) -> Any:
    common = {
        "request_id": "r",
        "arrival_time": 1.5,
        "num_prompt_tokens": 9,
        "num_output_tokens": 3,
        "block_hashes": [b"\1" * 32, b"\2" * 32],
    }
    return SimpleNamespace(**common | fields)


def test_the_recorder_writes_each_request_once_it_ends(tmp_path):
    path = tmp_path / "trace.jsonl"
    recorder = Recorder(str(path), 4, ["FullAttentionSpec"])
    prefill = SimpleNamespace(num_prompt_tokens=0, num_cached_tokens=0)
    context = BlockContext(priority=2, expires_at=10.0)
    request = ended(prefill_stats=prefill, block_context=context)
    recorder.arrives(request, 7.0)
    prefill.num_prompt_tokens, prefill.num_cached_tokens = 9, 4
    request.prefill_stats = None  # as 0.32 does
    recorder.ends(request)
    recorder.arrives(ended(), 7.0)
    recorder.ends(ended(num_cached_tokens=-1, num_output_tokens=0))  # 0.19, aborted
    recorder.close()
    first, second = read_trace(path).entries
    assert (first.cached_tokens, first.output_length) == (4, 3)
    assert (first.priority, first.ttl_s) == (2, 3.0)
    assert (second.cached_tokens, second.output_length) == (None, 0)


def test_a_full_disk_ends_the_record_and_nothing_else(tmp_path, caplog, monkeypatch):
    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(TraceWriter, "write", full)
    recorder = Recorder(str(tmp_path / "trace"), 4, [])
    recorder.arrives(ended(), 7.0)
    recorder.ends(ended())
    recorder.ends(ended())
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_a_request_that_makes_no_line_has_none_and_the_others_have(tmp_path, caplog):
    path = tmp_path / "trace"
    recorder = Recorder(str(path), 4, [])
    bad = BlockContext(session="\ud800")
    for context in (bad, BlockContext(), bad, BlockContext()):
        recorder.ends(ended(block_context=context))
    recorder.close()
    assert len(read_trace(path).entries) == 2
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_two_engines_do_not_write_one_file(tmp_path):
    path = str(tmp_path / "trace")
    first = Recorder(path, 4, [])
    with pytest.raises(ConfigError, match="another engine writes this file"):
        Recorder(path, 4, [])
    first.close()
    Recorder(path, 4, []).close()


def test_a_trace_that_cannot_be_written_is_a_wrong_setting(tmp_path):
    with pytest.raises(ConfigError, match="record_trace="):
        Recorder(str(tmp_path / "no folder" / "trace"), 4, [])
