"""Settings that cannot work are refused where they are made, by name."""

from typing import Any

import msgspec
import pytest

from kvplugin.errors import ConfigError
from kvplugin.scheduler import SchedulerConfig
from tests.core.manager_setups import full, mamba
from tests.scheduler.harness import Harness

WRONG: dict[str, list[Any]] = {
    "max_num_batched_tokens": [0, -1, 1.5, 8.0, "8", None, True],
    "max_num_seqs": [0, None, 2.5],
    "policy": ["prioritty", "", None, 3],
    "long_prefill_token_threshold": [-1, 0.5, None],
    "num_lookahead_tokens": [-1, "1"],
    "scheduler_reserve_full_isl": [1, "yes", None],
    "kv_load_failure_policy": ["abort", None],
    "load_timeout_s": [0, float("nan"), float("inf"), "60", None, True],
    "max_overdue_fraction": [1.5, -0.1, None, float("nan")],
    "pipeline_depth": [0, 3, 1.5, "2", None],
}


def test_every_setting_is_checked() -> None:
    assert set(WRONG) == set(SchedulerConfig.__struct_fields__)


@pytest.mark.parametrize(
    ("key", "value"),
    [(key, value) for key, values in WRONG.items() for value in values],
)
def test_impossible_settings_are_refused(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        SchedulerConfig(**{key: value})
    assert key in str(caught.value)
    assert str(value) in str(caught.value)


def test_names_are_told_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"mean 'priority'.*Known: fcfs, priority"):
        SchedulerConfig(policy="prioritty")
    with pytest.raises(ConfigError, match="must be of type int"):
        SchedulerConfig(max_num_seqs=2.5)
    assert SchedulerConfig(load_timeout_s=3).load_timeout_s == 3


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="max_seqs"):
        msgspec.convert({"max_seqs": 3}, SchedulerConfig)


@pytest.mark.parametrize("ranks", [0, -1, 1.0, None])
def test_there_is_a_rank(ranks: Any) -> None:
    with pytest.raises(ConfigError, match=f"num_ranks={ranks}"):
        Harness(connects=True, ranks=ranks)


@pytest.mark.parametrize(
    "key", ["max_num_batched_tokens", "long_prefill_token_threshold"]
)
@pytest.mark.parametrize("tokens", [1, 8, 15, 16])
def test_a_step_computes_at_least_a_block_of_aligned_states(
    key: str, tokens: int
) -> None:
    groups = [full(16), mamba("align", 16)]
    settings = {"max_num_batched_tokens": 64, key: tokens}
    if tokens < 16:
        with pytest.raises(ConfigError, match=f"{key}={tokens} .* 16 tokens"):
            Harness(40, groups, **settings)
        return
    engine = Harness(40, groups, **settings)
    engine.add("a", range(40), 2)
    engine.run()
    assert len(engine.outputs["a"]) == 2
