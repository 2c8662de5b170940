"""What the engine is told of transfers under way: whether to step, and to wait."""

from kvplugin.connectors.offload.messages import VERSION, Plan, Report
from kvplugin.contract import GroupKind
from kvplugin.wire import encode
from tests.offload.half import Half, engine, group, request
from tests.offload.setup_model import View

PROMPT = [*range(16)]


def storing(**settings: float) -> tuple[Half, View, Plan]:
    """A request has been computed and runs; its store is under way."""
    half = Half(engine(group(GroupKind.FULL), asks_pending_work=False), **settings)
    view = request(PROMPT)
    half.admit(view, [1, 2, 3, 4])
    plan = half.step(view, 0, 16)
    assert plan is not None
    return half, view, plan


class TestBlocksThatWillBeFreeSoon:
    def test_not_those_that_a_running_request_keeps(self) -> None:
        half, view, _ = storing()
        assert not half.scheduler.has_pending_frees()
        half.step(view, 16, 1)
        assert not half.scheduler.has_pending_frees()

    def test_those_of_a_request_that_has_ended(self) -> None:
        half, view, plan = storing()
        half.scheduler.finished(view)
        assert half.scheduler.has_pending_frees()
        half.end(plan.stores[0].id)
        assert not half.scheduler.has_pending_frees()

    def test_those_of_a_request_that_was_preempted(self) -> None:
        half, *_ = storing()
        half.step(preempted=["r"])
        assert half.scheduler.has_pending_frees()

    def test_those_of_a_request_that_began_again_in_the_step_that_says_so(self) -> None:
        half, view, old = storing(offload_prompt_only=False)
        half.admit(view, [11, 12, 13, 14])
        half.step(view, 0, 16, preempted=["r"])
        assert half.scheduler.has_pending_frees()
        half.end(old.stores[0].id)
        assert not half.scheduler.has_pending_frees()

    def test_not_those_of_a_store_that_takes_too_long(self) -> None:
        half, view, _ = storing(lookup_wait_ms=500)
        half.scheduler.finished(view)
        half.clock.now += 0.5
        assert not half.scheduler.has_pending_frees()


class TestEndsOfRequestsWithALoad:
    """In an engine that steps for requests only."""

    def given_up(self) -> tuple[Half, View]:
        """A load was given up, and its request stores what it computes itself."""
        half, view, plan = storing()
        half.end(plan.stores[0].id)
        half.scheduler.finished(view)
        view = request([*PROMPT, *range(50, 58)], name="late")
        half.admit(view, [11, 12, 13, 14, 15, 16])
        half.step()
        half.clock.now += 31
        plan = half.step()
        assert plan is not None
        assert plan.given_up
        half.admit(view, [21, 22, 23, 24, 25, 26])
        half.step(view, 0, 24)
        return half, view

    def test_one_that_was_given_up_does_not_announce_the_end(self) -> None:
        """So the stores must."""
        half, view = self.given_up()
        half.scheduler.apply([encode(Report(VERSION, 0, 1000, []))])
        assert half.scheduler.finished(view)

    def test_until_the_engine_has_heard_of_it_it_does(self) -> None:
        half, view = self.given_up()
        assert not half.scheduler.finished(view)
