"""Specs, groups, tensors and memory checks equal vLLM's, bar what is listed here."""

import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import pytest

from kvplugin.errors import CapacityError, ConfigError, KVPluginError
from kvplugin.groups import (
    blocks_per_request,
    bytes_per_block,
    estimate_max_model_len,
    get_capacity,
    get_kv_cache_configs,
    get_kv_cache_groups,
    is_kv_cache_spec_uniform,
    unify_kv_cache_spec_page_size,
)
from kvplugin.groups.split import _split
from kvplugin.spec import KVCacheGroupSpec, KVCacheSpec
from tests.core.grouping_cases import Case, draw_case
from tests.oracles import V019, V032, ask

N_CASES = 400
BASE = {
    "max_model_len": 1000,
    "max_num_batched_tokens": 100,
    "max_num_encoder_input_tokens": 0,
    "decode_context_parallel_size": 1,
    "prefill_context_parallel_size": 1,
    "mamba_cache_mode": "none",
}
HEADS = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": "bfloat16"}


def plain_spec(spec: KVCacheSpec) -> tuple[str, dict[str, Any]]:
    """As the replay writes a spec."""
    found = {field.name: getattr(spec, field.name) for field in fields(spec)}
    if "kv_cache_specs" in found:
        inner = found["kv_cache_specs"]
        found["kv_cache_specs"] = {name: plain_spec(inner[name]) for name in inner}
    if "dtypes" in found:
        found["dtypes"] = str(found["dtypes"]).replace("'", "")
    return type(spec).__name__, found


def same_spec(ours: KVCacheSpec, theirs: tuple[str, Mapping[str, Any]]) -> bool:
    """Whether they agree in all fields that both have."""
    return _agree(plain_spec(ours), theirs)


def _agree(ours: tuple[str, Any], theirs: tuple[str, Any]) -> bool:
    if ours[0] != theirs[0]:
        return False
    mine, other = dict(ours[1]), dict(theirs[1])
    if ours[0] == "MLAAttentionSpec":
        other.pop("head_size_v", None)  # 0.32 writes 0
    ours_in, theirs_in = mine.pop("kv_cache_specs", {}), other.pop("kv_cache_specs", {})
    return (
        list(ours_in) == list(theirs_in)
        and all(_agree(ours_in[name], theirs_in[name]) for name in ours_in)
        and all(mine[name] == other[name] for name in mine.keys() & other.keys())
    )


def same_groups(ours: Sequence[KVCacheGroupSpec], theirs: Any) -> bool:
    return [group.layer_names for group in ours] == [names for names, _ in theirs] and (
        all(
            same_spec(group.kv_cache_spec, spec)
            for group, (_, spec) in zip(ours, theirs, strict=True)
        )
    )


def attempt(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except KVPluginError as error:
        return error


def is_error(answer: Any) -> bool:
    return isinstance(answer, tuple) and len(answer) == 3 and answer[0] == "error"


def two_digits(message: str) -> str:
    """With sizes as vLLM rounds them; ours has more digits where that shows 0.0."""
    return re.sub(
        r"([\d.e-]+) GiB", lambda size: f"{round(float(size[1]), 2)} GiB", message
    )


def check_error(ours: Any, theirs: tuple[str, str, str]) -> str:
    """Ours refuses what theirs does, with the text that users search for."""
    _, kind, message = theirs
    assert isinstance(ours, KVPluginError), theirs
    if kind == "AssertionError":
        # 0.19 stops on an assertion: a page that does not scale, or a window with DCP.
        assert isinstance(ours, ConfigError)
        assert message in str(ours)
        return "refused"
    if message.startswith(("To serve", "No available", "Cannot auto-fit")):
        assert isinstance(ours, CapacityError)
        assert two_digits(str(ours)) == two_digits(message)
        return message[:10]
    assert isinstance(ours, ConfigError)
    assert str(ours).startswith(message)
    return kind


def draw_cases(version: str) -> list[Case]:
    rng = random.Random(f"grouping {version}")
    return [draw_case(rng, version) for _ in range(N_CASES)]


def check_memory(case: Case, theirs: Mapping[str, Any], *, version: str) -> None:
    config = case.config(vllm019=True)
    for name, spec in case.specs().items():
        assert spec.page_size_bytes == theirs["pages"][name]
        ours = attempt(lambda spec=spec: spec.max_memory_usage_bytes(config))
        if is_error(theirs["memory"][name]):
            check_error(ours, theirs["memory"][name])
        else:
            assert ours == theirs["memory"][name], (version, spec)


def test_random_models_equal_vllm_019() -> None:
    cases = draw_cases(V019)
    seen: Counter[str] = Counter()
    for case, theirs in zip(cases, ask(V019, "grouping", cases), strict=True):
        check_memory(case, theirs, version=V019)
        config = case.config(vllm019=True)
        specs = case.specs()
        groups = attempt(lambda specs=specs, c=config: get_kv_cache_groups(specs, c))
        if is_error(theirs["groups"]):
            seen["groups " + check_error(groups, theirs["groups"])] += 1
            continue
        assert same_groups(groups, theirs["groups"]), (case, groups)
        seen[f"{min(len(groups), 3)} groups"] += 1
        seen[type(groups[0].kv_cache_spec).__name__] += 1
        if is_error(theirs["estimate"]):
            continue
        assert theirs["estimate"] == estimate_max_model_len(
            groups, config, case.available[0]
        )
        seen["configs " + check_configs(case, theirs)] += 1
    wanted = {"1 groups", "2 groups", "3 groups", "UniformTypeKVCacheSpecs"}
    wanted |= {"groups NotImplementedError", "groups ValueError", "groups refused"}
    wanted |= {"configs To serve a", "configs Cannot aut", "configs equal"}
    assert all(seen[name] >= 5 for name in wanted), seen


def check_configs(case: Case, theirs: Mapping[str, Any]) -> str:
    config, specs = case.config(vllm019=True), case.specs()
    workers = [{name: specs[name] for name in names} for names in case.workers]
    found = attempt(lambda: get_kv_cache_configs(workers, config, case.available))
    if is_error(theirs["configs"]):
        return check_error(found, theirs["configs"])
    assert found.config.max_model_len == theirs["max_model_len"]
    for ours, other in zip(found.configs, theirs["configs"], strict=True):
        assert ours.num_blocks == other["num_blocks"]
        tensors = [(tensor.size, tensor.shared_by) for tensor in ours.kv_cache_tensors]
        assert tensors == other["tensors"]
        assert same_groups(ours.kv_cache_groups, other["groups"])
        capacity = get_capacity(ours, found.config)
        assert capacity.max_concurrency == pytest.approx(other["concurrency"])
    return "equal"


def test_random_models_equal_vllm_032() -> None:
    cases = draw_cases(V032)
    seen: Counter[str] = Counter()
    for case, theirs in zip(cases, ask(V032, "grouping", cases), strict=True):
        check_memory(case, theirs, version=V032)
        specs = case.specs()
        assert is_kv_cache_spec_uniform(specs) == theirs["uniform"]
        unified = attempt(lambda s=specs: unify_kv_cache_spec_page_size(s, pad=True))
        if is_error(theirs["unified"]):
            _, kind, _ = theirs["unified"]
            if kind == "NotImplementedError":
                assert isinstance(unified, ConfigError)
            seen[kind] += 1
            continue
        assert list(unified) == list(theirs["unified"])
        assert all(same_spec(unified[n], theirs["unified"][n]) for n in unified)
        seen["unified"] += 1
        if not is_error(theirs["split"]):
            assert same_groups(_split(unified, frozenset()), theirs["split"])
            seen["split"] += 1
    assert seen["unified"] > 200, seen
    assert seen["split"] > 200, seen
    assert seen["NotImplementedError"] > 20, seen


# -- where ours is different on purpose ----------------------------------------------


def case_of(**layers: tuple[str, dict[str, Any]]) -> Case:
    return Case(layers=layers, workers=[list(layers)], limits=BASE, available=[1 << 30])


FULL = ("FullAttentionSpec", HEADS)
NARROW = ("FullAttentionSpec", HEADS | {"head_size_v": 32})
WINDOW_A = ("FullAttentionSpec", HEADS | {"sliding_window": 32})
WINDOW_B = ("FullAttentionSpec", HEADS | {"sliding_window": 64})
SINK = ("SinkFullAttentionSpec", HEADS | {"sink_len": 16})
MLA = ("MLAAttentionSpec", HEADS | {"num_kv_heads": 1})
WIDE_MLA = ("MLAAttentionSpec", HEADS | {"num_kv_heads": 1, "head_size": 128})
ENCODER = ("EncoderOnlyAttentionSpec", HEADS)
ENCODER_B = ("EncoderOnlyAttentionSpec", HEADS | {"num_kv_heads": 4})
CHUNK = ("ChunkedLocalAttentionSpec", HEADS | {"attention_chunk_size": 64})
SLIDING = ("SlidingWindowSpec", HEADS | {"sliding_window": 1025})


def test_where_ours_differs_from_vllm_019() -> None:
    cases = {
        "value sizes": case_of(a=FULL, b=NARROW),
        "windows": case_of(a=WINDOW_A, b=WINDOW_B),
        "sink lost": case_of(a=FULL, b=SINK),
        "MLA shapes": case_of(a=MLA, b=WIDE_MLA),
        "encoder-only": case_of(a=ENCODER, b=ENCODER_B),
        "window": case_of(a=SLIDING),
        "chunk": case_of(a=CHUNK),
    }
    answers = ask(V019, "grouping", list(cases.values()))
    theirs = dict(zip(cases, answers, strict=True))
    ours = {
        name: get_kv_cache_groups(case.specs(), case.config(vllm019=False))
        for name, case in cases.items()
    }
    kinds = {
        name: [type(group.kv_cache_spec).__name__ for group in groups]
        for name, groups in ours.items()
    }
    uniform = ["UniformTypeKVCacheSpecs"]
    # Merged with the value size of the first layer: too few or too many bytes.
    assert theirs["value sizes"]["groups"][0][1][0] == "FullAttentionSpec"
    assert kinds["value sizes"] == uniform
    # A ValueError out of the question whether the specs merge.
    assert theirs["windows"]["groups"][1] == "ValueError"
    assert kinds["windows"] == uniform
    # The sink is forgotten, depending on which layer comes first.
    assert theirs["sink lost"]["groups"][0][1][0] == "FullAttentionSpec"
    assert kinds["sink lost"] == ["FullAttentionSpec", "SinkFullAttentionSpec"]
    # Merged with the head size of the first layer.
    assert theirs["MLA shapes"]["groups"][0][1][0] == "MLAAttentionSpec"
    assert kinds["MLA shapes"] == uniform
    assert theirs["encoder-only"]["groups"][1] == "NotImplementedError"
    assert kinds["encoder-only"] == uniform
    # One block more than a request can have.
    window, chunk = ours["window"], ours["chunk"]
    limits = cases["window"].config(vllm019=False)
    page = bytes_per_block(window)
    assert theirs["window"]["memory"]["a"] == (63 + 1) * page
    assert blocks_per_request(window, limits) == 63
    assert theirs["chunk"]["memory"]["a"] == 11 * page
    assert blocks_per_request(chunk, limits) == 11
