"""The cores of vLLM 0.19.1 and 0.32, each in a process of its own.

Both packages are called `vllm`, so neither may be imported by the tests: a *replay*
(a module in this folder that reads a request and returns an answer, both picklable)
runs in a subprocess that sees the version asked for. `make setup` unpacks 0.19.1's
wheel, without its dependencies, into `.cache/`; 0.32 is the installed one.
"""

import os
import pickle
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
V019: Final = "0.19.1"
V032: Final = "0.32.0"
UNPACKED_V019: Final = ROOT / ".cache" / f"vllm-{V019}"

_START_LIMIT_S: Final = 600


def ask(version: str, replay: str, request: object) -> Any:
    """The answer of `tests.oracles.<replay>.answer(request)` under that vLLM.

    Raises:
        RuntimeError: the replay failed; the message ends with its traceback.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tests.oracles", version, replay],
        input=pickle.dumps(request),
        capture_output=True,
        cwd=ROOT,
        env=environment(version),
        timeout=_START_LIMIT_S,
    )
    if done.returncode:
        raise RuntimeError(f"{replay} on vLLM {version}:\n{done.stderr.decode()}")
    return pickle.loads(done.stdout)


@cache
def environment(version: str) -> dict[str, str]:
    """Of a process that sees this vLLM."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"PYTHONHASHSEED": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    env |= {"VLLM_PLUGINS": "", "KVPLUGIN_DISABLE": "1"}
    if version == V019:
        if not (UNPACKED_V019 / "vllm").is_dir():
            raise RuntimeError(f"{UNPACKED_V019} is missing: run `make setup`")
        env["PYTHONPATH"] = str(UNPACKED_V019)
    return env
