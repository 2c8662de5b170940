"""The demo itself, in small, on stock vLLM."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvplugin.integration.demo.engine import EngineError, run_engine
from kvplugin.integration.demo.engine_process import Job
from kvplugin.integration.demo.scale import QUICK

pytestmark = pytest.mark.engine


def test_quick_run_loads_documents_and_answers_the_same(
    model_cache: Path, tmp_path: Path
) -> None:
    options = ["run", "--quick", "--json", "--out", str(tmp_path / "out")]
    run = subprocess.run(
        [sys.executable, "-m", "kvplugin.integration.demo", *options],
        env={**os.environ, "KVPLUGIN_CACHE": str(model_cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    assert report["answers"] == QUICK.requests
    assert report["answers_differing"] == 0
    assert report["largest_logprob_gap"] == 0.0
    returns = QUICK.documents * (QUICK.visits - 1)
    cases = [answer["case"] for answer in report["without"]["answers"]]
    assert cases.count("recomputed") == returns
    assert report["without"]["loaded_tokens"] == 0
    cases = [answer["case"] for answer in report["with"]["answers"]]
    assert cases.count("loaded") == returns
    assert report["with"]["loaded_tokens"] == returns * QUICK.prefix_tokens
    totals = report["with"]["totals"]
    assert totals["kvplugin_offload_loaded_tokens"] == report["with"]["loaded_tokens"]
    assert totals["kvplugin_offload_load_seconds"] > 0
    files = {file.name for file in (tmp_path / "out").iterdir()}
    assert files == {"ttft.svg", "ttft.png", "vllm-without.log", "vllm-with.log"}


def test_an_engine_that_cannot_start_shows_the_end_of_its_log(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    job = Job(model=tmp_path / "nothing", scale=QUICK, prompts=[], cpu_bytes=None)
    with pytest.raises(EngineError, match=f"{log}(?s:.*)nothing"):
        run_engine(job, log, lambda message: None)
