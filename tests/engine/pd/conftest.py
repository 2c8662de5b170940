"""Engines that hand prompts over to each other."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.engine.pd.hosts import Engines

StartEngines = Callable[..., Engines]


@pytest.fixture(scope="module")
def start_engines(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[StartEngines]:
    """Make `Engines` that end with the module; keyword arguments of `EngineHost`."""
    made: list[Engines] = []

    def make(**defaults: Any) -> Engines:
        made.append(Engines(tmp_path_factory.mktemp("engines"), **defaults))
        return made[-1]

    yield make
    for engines in made:
        engines.close()


@pytest.fixture(scope="module")
def tiny_engines(start_engines: StartEngines, llama: Any) -> Engines:
    """Engines with the tiny model."""
    return start_engines(
        model=str(llama), skip_tokenizer_init=True, kv_cache_memory_bytes=64 << 20
    )
