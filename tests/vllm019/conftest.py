"""Tests of vLLM 0.19.1, which `make test-vllm-019` runs: elsewhere they are deselected,
as pytest's summary says."""

from pathlib import Path

import pytest

from tests.engine.conftest import (  # noqa: F401
    gemma,
    llama,
    smollm2,
    start_engine,
    start_tiny,
)
from tests.engine.pd.conftest import start_engines  # noqa: F401
from tests.engine.version import is_019


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    ours = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in ours:
        item.add_marker(pytest.mark.engine)
    if ours and not is_019():
        config.hook.pytest_deselected(items=ours)
        items[:] = [item for item in items if item not in ours]
