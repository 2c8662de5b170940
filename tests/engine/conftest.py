"""Engines of the tests; the costly ones serve a whole module."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvplugin.integration.demo.model import cache_folder, prepare_smollm2, tiny_llama
from tests.engine.host import EngineHost
from tests.engine.hybrids import GEMMA, QWEN3_NEXT
from tests.engine.models import tiny_mistral

StartEngine = Callable[..., EngineHost]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The real model."""
    return prepare_smollm2(cache_folder())


@pytest.fixture(scope="session")
def llama() -> Path:
    """A random model of four layers: 2 KiB of KV a token."""
    return tiny_llama(cache_folder() / "tests" / "llama-4x2", layers=4)


@pytest.fixture(scope="session")
def gemma() -> Path:
    """A random hybrid model."""
    return GEMMA.build(cache_folder() / "tests" / GEMMA.name)


@pytest.fixture(scope="session")
def mistral() -> Path:
    """A random model with windows alone."""
    return tiny_mistral(cache_folder() / "tests" / "mistral-3")


@pytest.fixture(scope="session")
def qwen3_next() -> Path:
    """A random hybrid model with recurrent states."""
    return QWEN3_NEXT.build(cache_folder() / "tests" / QWEN3_NEXT.name)


@pytest.fixture(scope="module")
def start_engine(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[StartEngine]:
    """Start engines that end with the module; keyword arguments of `EngineHost`."""
    hosts: list[EngineHost] = []

    def start(**arguments: Any) -> EngineHost:
        log = tmp_path_factory.mktemp("engine") / "log.txt"
        hosts.append(EngineHost(log, **arguments))
        return hosts[-1]

    yield start
    for host in hosts:
        host.close()


@pytest.fixture(scope="module")
def start_tiny(start_engine: StartEngine, llama: Path) -> StartEngine:
    """`start_engine` with the tiny model, which has no tokenizer."""

    def start(**arguments: Any) -> EngineHost:
        defaults = {
            "model": str(llama),
            "skip_tokenizer_init": True,
            "kv_cache_memory_bytes": 64 << 20,
        }
        return start_engine(**(defaults | arguments))

    return start
