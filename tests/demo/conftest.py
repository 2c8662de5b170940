"""What the tests of the demo share: the prepared model, and recorded numbers."""

from pathlib import Path

import pytest

from kvplugin.integration.demo.model import prepare_smollm2
from kvplugin.integration.demo.results import Answer, Comparison, EngineRun

QUESTION_TOKENS = 99
DOCUMENT_TOKENS = 3840


@pytest.fixture(scope="session")
def model_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder in which SmolLM2 was prepared from its GGUF file, just now."""
    cache = tmp_path_factory.mktemp("cache")
    prepare_smollm2(cache)
    return cache


@pytest.fixture(scope="session")
def smollm2(model_cache: Path) -> Path:
    return prepare_smollm2(model_cache)


def answer(source: str, ttft_s: float, visit: int) -> Answer:
    """An answer whose document was `computed`, `local` or `loaded`."""
    tokens = {"computed": 0, "local": 0, "loaded": 0}
    tokens[source] += DOCUMENT_TOKENS
    return Answer(
        document="Lake Orrin",
        visit=visit,
        question="Who moved the moth trap?",
        text="Ines Kallio moved it.",
        token_ids=[11, 12, 13],
        logprobs=[-0.1, -0.25, -0.5],
        ttft_s=ttft_s,
        computed_tokens=tokens["computed"] + QUESTION_TOKENS,
        local_tokens=tokens["local"],
        loaded_tokens=tokens["loaded"],
    )


@pytest.fixture
def comparison() -> Comparison:
    """Two visits to one document, as once measured on two cores."""
    without = EngineRun(
        start_s=11.0,
        answers=[
            answer("computed", 2.2, visit=0),
            answer("local", 0.12, visit=0),
            answer("computed", 2.4, visit=1),
        ],
        totals={},
    )
    with_kvplugin = EngineRun(
        start_s=11.5,
        answers=[
            answer("computed", 2.3, visit=0),
            answer("local", 0.12, visit=0),
            answer("loaded", 0.15, visit=1),
        ],
        totals={
            "kvplugin_offload_loaded_tokens": 3840.0,
            "kvplugin_offload_loaded_bytes": 88_473_600.0,
            "kvplugin_offload_stored_bytes": 88_473_600.0,
            "kvplugin_offload_load_seconds": 0.02,
            "kvplugin_offload_recompute_seconds_saved": 2.25,
        },
    )
    return Comparison(
        title="A recorded run", without=without, with_kvplugin=with_kvplugin
    )
