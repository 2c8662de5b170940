"""Rules that no output of a request depends on, and those of progress, broken on
purpose (see `mutations.py`)."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from msgspec import structs

from kvplugin import choices
from kvplugin.demand import Demand
from kvplugin.hooks import Hooks
from kvplugin.manager import KVCacheManager
from kvplugin.scheduler import Entry, SchedulerConfig, SchedulerOutput, scheduler
from kvplugin.scheduler.describe import describe
from kvplugin.scheduler.planner import Planner
from kvplugin.scheduler.roster import Roster
from kvplugin.scheduler.step import StepPlan
from tests.core.manager_setups import full
from tests.core.test_demand import test_the_policy_hears_at_each_step_who_waits
from tests.scheduler import test_rules as rules
from tests.scheduler.harness import Connector
from tests.scheduler.mutations import Mutation, around, method, seeds, stuck_at
from tests.scheduler.test_epochs import test_both_caches_are_reset_and_both_must_agree
from tests.scheduler.test_progress import random_run
from tests.scheduler.test_synchronous_loads import (
    test_every_row_that_was_lost_with_a_step_in_flight_is_followed,
)


def loads_out_of_phase() -> None:
    """Seeds in which two requests take turns at losing what they have, if they may."""
    for seed in (611, 784, 1068):
        random_run(seed)


def always(
    owner: type, name: str, value: Callable[[Any], Any]
) -> Callable[[pytest.MonkeyPatch], None]:
    """An attribute of instances that keeps one value, whatever is assigned."""
    broken = property(value, lambda self, new: None)
    return lambda patch: patch.setattr(owner, name, broken, raising=False)


def without(**fields: Any) -> Callable[[Any, Any, Any], SchedulerOutput]:
    """`describe` that says nothing of something."""
    right = scheduler.describe
    return lambda step, roster: replace(right(step, roster), **fields)


def progress_without_blocks(right: Any, self: StepPlan, watched: Any) -> Any:
    return [replace(part, new_block_ids=()) for part in right(self, watched)]


def no_preemptions(step: Any, roster: Roster) -> SchedulerOutput:
    """The connector is not told."""
    preempted, roster.preempted = roster.preempted, set()
    return replace(describe(step, roster), preempted_req_ids=frozenset(preempted))


def no_threshold(config: SchedulerConfig) -> SchedulerConfig:
    return structs.replace(config, long_prefill_token_threshold=0)


def broken_settings(change: Any) -> Callable[[pytest.MonkeyPatch], None]:
    """The planner reads other settings."""
    right = Planner.__init__

    def init(self: Planner, *args: Any) -> None:
        right(self, *args)
        self._config = change(self._config)

    return lambda patch: patch.setattr(Planner, "__init__", init)


def without_encoder(right: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    return right(self, *args, **(kwargs | {"num_encoder_tokens": 0}))


def drafts_to_the_end(right: Any, self: Planner, entry: Entry, budget: int) -> Any:
    most, self._manager.max_model_len = self._manager.max_model_len, 10**6
    answer = right(self, entry, budget)
    self._manager.max_model_len = most
    return answer


RULE_MUTATIONS = [
    Mutation(
        "more requests run than may",
        broken_settings(lambda config: structs.replace(config, max_num_seqs=999)),
        partial(rules.test_no_more_requests_run_than_max_num_seqs, 2, 0),
    ),
    Mutation(
        "drafts go beyond the longest length",
        around(Planner, "_next_tokens", drafts_to_the_end),
        partial(rules.test_drafts_end_before_the_longest_length, 5),
    ),
    Mutation(
        "a step computes a long prompt as far as it can",
        broken_settings(no_threshold),
        partial(rules.test_a_step_computes_so_much_of_one_prompt, 5, 0),
    ),
    Mutation(
        "plugins do not order who waits",
        always(Hooks, "orders_waiting", lambda self: False),
        partial(rules.test_plugins_are_followed, "fcfs"),
    ),
    Mutation(
        "plugins do not choose victims",
        always(Hooks, "chooses_victim", lambda self: False),
        partial(rules.test_plugins_are_followed, "fcfs"),
    ),
    Mutation(
        "plugins do not keep anybody out",
        always(Hooks, "chooses_admission", lambda self: False),
        rules.test_a_plugin_ends_the_admissions_of_a_step,
    ),
    Mutation(
        "who was admitted is still said to wait",
        method(Demand, "remove", lambda self, request: None),
        partial(test_the_policy_hears_at_each_step_who_waits, (full(),), 1),
    ),
    Mutation(
        "hashes of new weights are not said to be wanted",
        method(Demand, "renew", lambda self, requests: None),
        partial(test_the_policy_hears_at_each_step_who_waits, (full(),), 1),
    ),
    Mutation(
        "by priority the last one loses its blocks",
        method(choices, "last_in_order", lambda running, policy: running[-1]),
        rules.test_the_victim_by_priority_is_not_the_last_one,
    ),
    Mutation(
        "frees under way stop nobody",
        method(Planner, "_frees_are_coming", lambda self: False),
        partial(
            rules.test_nobody_is_preempted_while_the_connector_is_about_to_free, True
        ),
    ),
    Mutation(
        "nothing is zeroed",
        method(scheduler, "describe", without(new_block_ids_to_zero=())),
        rules.test_blocks_that_must_be_zeroed_are_told_once,
    ),
    Mutation(
        "no prefix is common",
        method(scheduler, "describe", without(num_common_prefix_blocks=())),
        rules.test_the_common_prefix_is_told,
    ),
    Mutation(
        "the connector does not hear of new blocks",
        around(StepPlan, "progress", progress_without_blocks),
        rules.test_a_connector_hears_of_progress,
    ),
    Mutation(
        "the connector does not hear of preemptions",
        method(scheduler, "describe", no_preemptions),
        rules.test_a_connector_hears_of_preemptions_once,
    ),
    Mutation(
        "the encoder's tokens get no blocks",
        around(KVCacheManager, "allocate_slots", without_encoder),
        rules.test_encoder_tokens_have_blocks,
    ),
    Mutation(
        "no token was found anywhere",
        method(Entry, "num_cached_tokens", stuck_at(0)),
        partial(rules.test_tokens_that_were_not_computed_are_told, 8, 0),
    ),
    Mutation(
        "the connector remembers what it has stored",
        method(Connector, "reset", lambda self: True),
        partial(test_both_caches_are_reset_and_both_must_agree, True, True, None),
    ),
    Mutation(
        "who runs gives way to who does not",
        method(Planner, "_instead_of", lambda self, entry: entry),
        loads_out_of_phase,
    ),
    Mutation(
        "whoever waits is admitted though others lack blocks",
        method(StepPlan, "closed", stuck_at(False)),
        loads_out_of_phase,
    ),
    Mutation(
        "drafts are used though a step has overtaken them",
        method(Entry, "waits_for_drafts", property(lambda self: False)),
        seeds("full", depth=2, drafts=2),
    ),
    Mutation(
        "rows that were lost are never followed",
        always(Entry, "lost", lambda self: []),
        partial(test_every_row_that_was_lost_with_a_step_in_flight_is_followed, 1),
    ),
]
