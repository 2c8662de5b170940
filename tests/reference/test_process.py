"""Engines in processes of their own: equal answers, typed errors, and no hang."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvplugin.connectors.offload.config import OffloadConfig
from kvplugin.errors import ConfigError, IntegrityError
from kvplugin.integration.reference import ReferenceEngine, SamplingParams
from kvplugin.integration.reference.connector import offload
from kvplugin.integration.reference.orders import Generate, News, ServedAll
from kvplugin.integration.reference.process import EngineProcess, EngineProcessError
from kvplugin.request import RequestError
from tests.reference.models import MIXES, prompts, settings, tiny

PARAMS = SamplingParams(max_tokens=8)
TESTS = Path(__file__)
WAIT = 60.0
"""Seconds after which a test gives up on something that should happen at once."""


def make(mix: str = "full+window", with_host: bool = False) -> ReferenceEngine:
    """What the processes serve."""
    host = offload(OffloadConfig(cpu_bytes_to_use=8 << 20)) if with_host else None
    return ReferenceEngine(tiny(MIXES[mix]), settings(), host)


class StuckEngine(ReferenceEngine):
    def abort(self, req_id: str) -> None:
        if req_id == "stuck":
            time.sleep(3600)
        raise LookupError(f"no {req_id}")


def make_stuck() -> ReferenceEngine:
    return StuckEngine(tiny(MIXES["full"]), settings())


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[EngineProcess, EngineProcess]]:
    """Two engines at once; a start takes seconds, so tests share them."""
    one, other = EngineProcess(make), EngineProcess(make, "full", True)
    with one, other:
        yield one, other


def test_two_processes_answer_as_an_engine_here_does(
    pair: tuple[EngineProcess, EngineProcess],
) -> None:
    batch = prompts(3)
    for process in pair:
        process.send(Generate(batch, PARAMS))
    replies = [process.receive(ServedAll).answers for process in pair]
    for answers, mix in zip(replies, ("full+window", "full"), strict=True):
        here = make(mix).generate(batch, PARAMS)
        assert [a.token_ids for a in answers] == [a.token_ids for a in here]
    assert pair[0].pid != pair[1].pid != os.getpid()


def test_both_step_by_step_in_turns(pair: tuple[EngineProcess, EngineProcess]) -> None:
    (prompt,) = prompts(1, seed=4)
    ids = [process.add_request(prompt, PARAMS) for process in pair]
    tokens: list[list[int]] = [[], []]
    while any(process.stats().has_work for process in pair):
        for process, found in zip(pair, tokens, strict=True):
            for heard in process.step().heard:
                found += heard.new_token_ids
    for found, mix in zip(tokens, ("full+window", "full"), strict=True):
        (here,) = make(mix).generate([prompt], PARAMS)
        assert found == here.token_ids
    assert all(ids)


def test_orders_of_one_engine(pair: tuple[EngineProcess, EngineProcess]) -> None:
    _, engine = pair
    (prompt,) = prompts(1, seed=9)
    assert not engine.generate([prompt], PARAMS)[0].num_cached_tokens
    assert engine.reset_prefix_cache(local_only=True)
    assert engine.generate([prompt], PARAMS)[0].num_cached_tokens == 20
    stats = engine.stats()
    assert stats.num_requests == 0
    assert stats.num_free_blocks == stats.num_usable_blocks
    assert stats.connector["loaded_blocks"] > 0
    salted = engine.add_request(prompt, PARAMS, req_id="mine", cache_salt="x")
    assert salted == "mine"
    assert engine.step(2).has_work
    engine.abort("mine")
    (heard,) = [h for h in engine.drain().heard if h.finish_reason]
    assert (heard.req_id, heard.finish_reason) == ("mine", "abort")
    assert heard.num_cached_tokens == 0
    assert engine.drain() == News([], False)


def test_errors_of_the_engine_are_raised_here(
    pair: tuple[EngineProcess, EngineProcess],
) -> None:
    engine, _ = pair
    with pytest.raises(RequestError, match="max_model_len"):
        engine.add_request(list(range(60)), SamplingParams(max_tokens=60))
    with pytest.raises(IntegrityError, match="no order is under way"):
        engine.receive(News)
    engine.send(Generate(prompts(1), PARAMS))
    with pytest.raises(IntegrityError, match="receive the reply to Generate"):
        engine.step()
    with pytest.raises(IntegrityError, match="the reply to Generate is ServedAll"):
        engine.receive(News)
    assert engine.is_alive  # none of this was its fault


def test_an_engine_that_cannot_be_built() -> None:
    process = EngineProcess(make_with_bad_setting)
    with pytest.raises(ConfigError, match="block_size"), process:
        raise AssertionError("it stands")
    assert not process.is_alive
    process.close()


def make_with_bad_setting() -> ReferenceEngine:
    return ReferenceEngine(tiny(MIXES["full"]), settings(block_size=0))


def test_an_order_that_is_never_answered_ends_the_process() -> None:
    engine = EngineProcess(make_stuck, reply_seconds=WAIT)
    engine.ready()
    with pytest.raises(EngineProcessError, match="LookupError: no x"):
        engine.abort("x")
    engine._reply_seconds = 0.2
    with pytest.raises(EngineProcessError, match=r"no reply to Abort within 0.2 s"):
        engine.abort("stuck")
    assert not engine.is_alive
    with pytest.raises(EngineProcessError):
        engine.stats()
    engine.close()
    engine.close()


@pytest.mark.full
def test_a_process_that_dies_is_noticed() -> None:
    engine = EngineProcess(make)
    engine.ready()
    engine.send(Generate(prompts(1), PARAMS))
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(EngineProcessError, match="exit code -9"):
        _ask_until_it_fails(engine)
    engine.close()


def _ask_until_it_fails(engine: EngineProcess) -> None:
    engine.receive(ServedAll)
    engine.stats()  # if it had answered before


PARENT = """
import os, sys
from kvplugin.integration.reference.process import EngineProcess
from kvplugin.integration.reference.orders import Abort
from tests.reference.test_process import make_stuck

if __name__ == "__main__":
    engine = EngineProcess(make_stuck)
    engine.ready()
    engine.send(Abort("stuck"))
    print(engine.pid, flush=True)
    os._exit(3)  # no farewell
"""


def test_the_process_ends_when_its_parent_dies(tmp_path: Path) -> None:
    """In the middle of an order that would never end."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    parent = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | {"PYTHONPATH": str(TESTS.parents[2])},
        stdout=subprocess.PIPE,
        timeout=WAIT * 2,
        check=False,
    )
    assert parent.returncode == 3
    pid, late = int(parent.stdout), time.monotonic() + WAIT
    while Path(f"/proc/{pid}").exists() and _is_running(pid):
        assert time.monotonic() < late, f"process {pid} goes on without its parent"
        time.sleep(0.02)


def _is_running(pid: int) -> bool:
    """A zombie that nobody has reaped yet does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_malformed_order_harms_nobody(
    pair: tuple[EngineProcess, EngineProcess],
) -> None:
    process, _ = pair
    for prompt in (["a"], [1.5]):
        with pytest.raises((EngineProcessError, IntegrityError)):
            process.generate([prompt], PARAMS)
        assert process.is_alive
    assert process.generate([[1, 2]], PARAMS)


def test_an_interrupted_order_is_not_answered_to_the_next() -> None:
    with EngineProcess(make_stuck) as process:
        process.ready()
        interrupted = threading.Event()
        threading.Thread(target=interrupt, args=(interrupted,), daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            process.abort("stuck")
        interrupted.set()
        assert not process.is_alive


def interrupt(done: threading.Event) -> None:
    """Ctrl-C, and again if nothing happens: one that comes between Python's look at
    its signals and a wait inside the kernel is heard only after the wait."""
    pause = 0.3
    while not done.wait(pause):
        os.kill(os.getpid(), signal.SIGINT)
        pause = 15
