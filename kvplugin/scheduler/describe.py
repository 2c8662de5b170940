"""A step that is decided, in the words of those who execute it."""

from kvplugin.contract import Step
from kvplugin.scheduler.output import SchedulerOutput
from kvplugin.scheduler.roster import Roster
from kvplugin.scheduler.step import StepPlan


def describe(step: StepPlan, roster: Roster) -> SchedulerOutput:
    """What workers are told. Also tells the connector, and takes the news of
    preempted and finished requests: to be called once a step."""
    shares, manager = step.shares, roster.manager
    rows = {id_: roster.rows(s.entry) for id_, s in shares.items() if s.admitted}
    to_zero = manager.take_new_block_ids()
    if step.took_back:
        to_zero = roster.in_use(to_zero)
    running = roster.running
    common = manager.get_num_common_prefix_blocks(running[0].id) if running else []
    preempted, roster.preempted = roster.preempted, set()
    finished, roster.finished = roster.finished, set()
    plan = b""
    if roster.connector is not None:
        progress = step.progress(roster.connector.watched)
        num_tokens = sum(share.num_tokens for share in shares.values())
        plan = roster.connector.plan_step(Step(progress, preempted, num_tokens))
    new, known = step.requests(rows)
    return SchedulerOutput(
        step=step.number,
        scheduled_new_reqs=new,
        scheduled_cached_reqs=known,
        num_scheduled_tokens={id_: s.num_tokens for id_, s in shares.items()},
        scheduled_spec_decode_tokens={
            id_: s.drafts for id_, s in shares.items() if s.drafts
        },
        num_common_prefix_blocks=common,
        new_block_ids_to_zero=to_zero,
        preempted_req_ids=frozenset(preempted),
        finished_req_ids=frozenset(finished),
        connector_plan=plan,
    )
