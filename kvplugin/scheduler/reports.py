"""Reports: what a connector's worker halves say after a step."""

from collections.abc import Sequence

from kvplugin.contract import WorkerOutcome
from kvplugin.scheduler.recovery import Recovery
from kvplugin.scheduler.roster import Roster


def hear(outcomes: Sequence[WorkerOutcome], roster: Roster, recovery: Recovery) -> None:
    """Take in a step's outcomes, one a rank; without a connector they mean nothing.

    Failures come before ends: the last rank's report must not hide another's.
    """
    if roster.connector is None:
        return
    wrong: set[int] = set()
    for outcome in outcomes:
        for request_id, blocks in outcome.failed_loads.items():
            wrong |= roster.loads.failed(request_id, blocks)
    if wrong:
        roster.connector.distrust(wrong)
    roster.connector.apply([outcome.report for outcome in outcomes if outcome.report])
    for rank, outcome in enumerate(outcomes):
        for request_id in outcome.finished_loads:
            load = roster.loads.reported(rank, request_id)
            if load is not None:
                recovery.load_ended(load)
        for request_id in outcome.finished_sends:
            roster.sends.reported(rank, request_id)
