"""The tests of models with windows, on vLLM 0.19.1 with our scheduler class.

Of the tiny models those that this version starts on a CPU. It has no MLA there
(`NotImplementedError: MLA is not supported on CPU`), and does not read Qwen3-Next's
convolutions (`dispatch_cpu_unquantized_gemm` unpacks a weight of three dimensions).

Engines are a little larger: it admits a prompt only where all its blocks would fit, of
window groups as well.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from kvplugin.integration.demo.model import cache_folder
from kvplugin.integration.vllm.policy_config import SCHEDULER_CLASS
from tests.engine import asking
from tests.engine.asking import assert_close
from tests.engine.host import EngineHost, EngineStartError, offload
from tests.engine.hybrids import DEEPSEEK, GEMMA, GPT_OSS, QWEN3_NEXT, Hybrid
from tests.engine.test_hybrid import *  # noqa: F403

SERVED = (replace(GEMMA, kv_bytes=48 << 15), replace(GPT_OSS, kv_bytes=16 << 17))


@pytest.fixture(scope="module", params=SERVED, ids=lambda hybrid: hybrid.name)
def model(request: Any) -> Hybrid:
    return request.param


@pytest.fixture(scope="module")
def engine(
    model: Hybrid, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineHost]:
    host = EngineHost(
        tmp_path_factory.mktemp(model.name) / "log.txt",
        **model.arguments(cache_folder() / "tests"),
        scheduler_cls=SCHEDULER_CLASS,
        kv_transfer_config=offload(cpu_bytes=64 << 20),
    )
    yield host
    host.close()


def test_a_second_question_hits_the_document(engine, model):
    """In host memory: this version keeps every block of a window itself as well, so its
    own cache is emptied first."""
    document = model.prompt("document", 3, 40)
    one = document + model.prompt("one", 1, 60)
    other = document + model.prompt("other", 0, 50)
    cold = engine.run(asking.ask_one, other)
    assert engine.run(asking.reset, True)
    engine.run(asking.ask_one, one)
    assert engine.run(asking.reset)
    loaded = engine.run(asking.ask_one, other)

    assert loaded.cached_tokens == model.most(document)
    assert_close(cold, loaded, model.noise)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (DEEPSEEK, "MLA is not supported on CPU"),
        (QWEN3_NEXT, "too many values to unpack"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_the_others_do_not_start_without_us_either(
    other: Hybrid, reason: str, start_engine: Any
) -> None:
    with pytest.raises(EngineStartError, match=reason):
        start_engine(**other.arguments(cache_folder() / "tests"))
