"""What can't be served is refused at once, and those beside it are served."""

from collections.abc import Callable
from typing import Any

import pytest

from kvplugin.connectors.offload.config import OffloadConfig
from kvplugin.errors import ConfigError
from kvplugin.integration.reference import (
    AttentionDrafter,
    EngineConfig,
    LayerConfig,
    ReferenceEngine,
    SamplingParams,
    random_draft_model,
)
from kvplugin.integration.reference.connector import Connector, offload
from kvplugin.request import RequestError
from kvplugin.worker import LayoutWish
from tests.reference.models import CROSS, FULL, WINDOW, assert_empty, settings, tiny

VOCABULARY = tiny((FULL,)).config.vocab_size


@pytest.mark.parametrize("token", [VOCABULARY, -1, 1.5, "a", True])
def test_tokens_that_the_model_lacks(token: Any) -> None:
    engine = ReferenceEngine(tiny((FULL,)), settings())
    good = engine.add_request([1, 2, 3], SamplingParams(max_tokens=2))
    with pytest.raises(RequestError, match="among its prompt tokens"):
        engine.add_request([1, token])
    engine.run()
    assert len(engine.answers[good].token_ids) == 2
    assert_empty(engine)


@pytest.mark.parametrize("encoder", [(), (VOCABULARY,), (-1,), range(9)])
def test_encoder_tokens_that_cannot_be(encoder: Any) -> None:
    config = settings(enable_prefix_caching=False, max_num_encoder_input_tokens=8)
    engine = ReferenceEngine(tiny((FULL, CROSS)), config)
    good = engine.add_request([1, 2], encoder_token_ids=[3])
    with pytest.raises(RequestError, match="encoder"):
        engine.add_request([1, 2], encoder_token_ids=encoder)
    engine.run()
    assert engine.answers[good].finish_reason == "length"


def test_encoder_tokens_without_cross_attention() -> None:
    config = settings(max_num_encoder_input_tokens=8)
    engine = ReferenceEngine(tiny((FULL,)), config)
    engine.add_request([1, 2], encoder_token_ids=[])
    engine.run()


@pytest.mark.parametrize("depth", [1, 2])
def test_an_id_is_in_use_until_its_end_was_heard(depth: int) -> None:
    engine = ReferenceEngine(tiny((FULL,)), settings(pipeline_depth=depth))
    engine.add_request([1, 2, 3], req_id="a")
    engine.step()
    engine.abort("a")
    with pytest.raises(RequestError, match="in use"):
        engine.add_request([4, 5, 6], req_id="a")
    engine.run()
    engine.add_request([4, 5, 6], req_id="a")
    engine.run()
    assert engine.answers["a"].finish_reason == "length"
    assert_empty(engine)


BAD_SETTINGS: dict[str, Callable[[], object]] = {
    "kv_cache_dtype": lambda: EngineConfig(kv_cache_dtype="int8"),
    "seed": lambda: SamplingParams(seed=2**45),
    "window": lambda: LayerConfig(window=-1),
    "head_size_v": lambda: LayerConfig(head_size_v=0),
    "kind": lambda: LayerConfig(kind="windowed"),  # type: ignore[arg-type]
    "layers": lambda: tiny((LayerConfig(kind="encoder_only"),)),
    "shares": lambda: tiny((WINDOW, LayerConfig(shares=0))),
}


@pytest.mark.parametrize("key", BAD_SETTINGS)
def test_settings_that_cannot_be_name_their_key(key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        BAD_SETTINGS[key]()


def test_offload_of_cross_attention_is_refused_by_name() -> None:
    host = offload(OffloadConfig(cpu_bytes_to_use=8 << 20))
    config = settings(enable_prefix_caching=False, max_num_encoder_input_tokens=8)
    with pytest.raises(ConfigError, match="cross_attention"):
        ReferenceEngine(tiny((FULL, CROSS)), config, host)


def test_a_connector_is_told_whose_it_is_and_wishes_a_layout() -> None:
    host = offload(OffloadConfig(cpu_bytes_to_use=8 << 20))
    told = []
    spying = Connector(
        lambda info: told.append(info.engine_id) or host.make_scheduler_half(info),
        host.make_worker_half,
        (LayoutWish("spy", "HND"),),
    )
    engine = ReferenceEngine(tiny((FULL,)), settings(engine_id="decode-1"), spying)
    assert (told, engine.plan.layout) == (["decode-1"], "LBHNC")
    engine.close()


def test_prompts_are_served_together_or_not_at_all() -> None:
    engine = ReferenceEngine(tiny((FULL,)), settings())
    with pytest.raises(RequestError):
        engine.generate([[1, 2], [-1]])
    engine.run()
    assert [a.finish_reason for a in engine.answers.values()] == ["abort"]
    assert_empty(engine)


def test_drafts_that_nobody_makes() -> None:
    with pytest.raises(ConfigError, match="num_drafts=2 needs a drafter"):
        ReferenceEngine(tiny((FULL,)), settings(num_drafts=2))


@pytest.mark.parametrize(
    "other", [{"num_drafts": 3}, {"block_size": 8}, {"max_model_len": 32}]
)
def test_a_drafter_for_another_engine(other: dict[str, int]) -> None:
    model, config = tiny((FULL,)), settings(num_drafts=2)
    drafter = AttentionDrafter(random_draft_model(model), config)
    with pytest.raises(ConfigError, match=f"made for {next(iter(other))}="):
        ReferenceEngine(model, settings(**({"num_drafts": 2} | other)), drafter=drafter)
