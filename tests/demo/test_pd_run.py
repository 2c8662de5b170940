"""The deployment as a whole: vLLM's own router between servers that only look like
vLLM, and (in the full run) between real ones."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvplugin.errors import KVPluginError
from kvplugin.integration.demo import processes
from kvplugin.integration.demo.pd import run as pd_run
from kvplugin.integration.demo.pd.plan import Deployment, Setup, deployment
from kvplugin.integration.demo.pd.questions import Question, questions
from kvplugin.integration.demo.pd.results import Outcome
from kvplugin.integration.demo.processes import Program

FAKE = Path(__file__).with_name("fake_engine.py")
QUESTIONS = [Question("short", "How many?"), Question("long", "How many? " * 200)]


class Fakes:
    """`run` with programs in place of vLLM's servers."""

    def __init__(self, out: Path, patch: pytest.MonkeyPatch) -> None:
        self.out = out
        self._patch = patch
        patch.setattr(pd_run, "METRICS_LIMIT_S", 0.3)
        patch.setattr(processes, "POLL_S", 0.05)

    def run(self, *, prefill: str = "", decode: str = "", router: str = "") -> Outcome:
        """Ask; faults are those of `fake_engine`, the router's is Python code."""
        faults = {"prefill": prefill, "decode": decode}

        def plan(setup: Setup) -> Deployment:
            real = deployment(setup)
            engines = [
                self._fake(program, name, faults[name])
                for name, program in zip(faults, real, strict=False)
            ]
            words = [sys.executable, "-c", router] if router else real.router.words
            return Deployment(
                *engines,
                Program("vllm-router", words, real.router.port, real.router.log),
            )

        self._patch.setattr(pd_run, "deployment", plan)
        setup = Setup(model=Path("/none"), out=self.out, connector="NixlConnector")
        return pd_run.run(setup, QUESTIONS, Console(quiet=True))

    def _fake(self, program: Program, name: str, fault: str) -> Program:
        record = self.out / f"{name}.jsonl"
        words = [sys.executable, str(FAKE), str(program.port), str(record), fault]
        return Program(program.name, words, program.port, program.log)

    def asked(self, name: str) -> list[dict[str, Any]]:
        """Bodies of the completions that a server was asked for."""
        lines = map(json.loads, (self.out / f"{name}.jsonl").read_text().splitlines())
        return [
            line["body"] for line in lines if line["path"] == "/v1/chat/completions"
        ]


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    return Fakes(tmp_path, monkeypatch)


def test_vllms_router_drives_prefill_and_decode_as_documented(fakes: Fakes) -> None:
    outcome = fakes.run()
    assert outcome.succeeded
    assert [case.text for case in outcome.cases] == ["9 characters", "2000 characters"]
    assert {case.moved.nbytes for case in outcome.cases} == {1000}
    asked = [body for body in fakes.asked("prefill") if "kv_transfer_params" in body]
    # First the prefill server: one token, not streamed, and nothing of the client's.
    assert len(asked) == len(QUESTIONS) + 1
    for body in asked:
        assert (body["max_tokens"], body["stream"]) == (1, False)
        assert body["kv_transfer_params"] == {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
    # Then the decode server, with the whole of what the other one said.
    for body in fakes.asked("decode"):
        assert (body["max_tokens"], body["stream"]) == (pd_run.ANSWER_TOKENS, True)
        params = body["kv_transfer_params"]
        assert params["remote_request_id"] == "lease"
        assert params["of_a_later_version"] == {"a": [1, None]}


def test_another_text_and_an_unread_prompt_are_no_success(fakes: Fakes) -> None:
    outcome = fakes.run(decode="differ")
    assert not outcome.succeeded
    assert len(outcome.differing) == len(QUESTIONS)


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_a_server_that_dies_is_named(fakes: Fakes, name: str) -> None:
    with pytest.raises(KVPluginError, match=f"the {name} server ended with status 3"):
        fakes.run(**{name: "die"})


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_a_server_that_refuses_is_an_error_of_the_request(
    fakes: Fakes, name: str
) -> None:
    with pytest.raises(KVPluginError, match="vllm-router answered 5"):
        fakes.run(**{name: "refuse"})
    assert len(fakes.asked(name)) == 1  # the router has not tried again


def test_a_stream_that_breaks_off_is_an_error(fakes: Fakes) -> None:
    with pytest.raises(KVPluginError, match=r"broke off|does not answer"):
        fakes.run(decode="break")


def test_a_router_that_ends_is_named(fakes: Fakes) -> None:
    with pytest.raises(KVPluginError, match=r"(?s)vllm-router ended .* no route"):
        fakes.run(router="raise SystemExit('there is no route')")


def test_an_unreachable_router_is_an_error_in_time(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pd_run, "START_LIMIT_S", 2.0)
    with pytest.raises(KVPluginError, match="vllm-router does not answer on http"):
        fakes.run(router="import time; time.sleep(1000)")


@pytest.mark.engine
@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("blocks", [(64, 128), (128, 64)])
def test_real_servers_answer_like_one(
    smollm2: Path, tmp_path: Path, blocks: tuple[int, int]
) -> None:
    prefill, decode = blocks
    setup = Setup(
        model=smollm2, out=tmp_path, prefill_block=prefill, decode_block=decode
    )
    outcome = pd_run.run(setup, questions(smollm2, (300, 1000)), Console(quiet=True))
    assert outcome.succeeded, outcome
