"""Fair shares: each hook alone, and a scheduler whose cache is too small."""

from collections.abc import Sequence

import pytest
from kvplugin_fair import FairShare, plugin, policy

from kvplugin import FullAttentionSpec, Request, get_hash_format
from kvplugin.hooks import AdmissionContext, Hooks, VictimContext, WaitingContext
from kvplugin.testing import Lab

SPEC = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="bfloat16")


def request(name: str, tenant: str = "", tokens: int = 4) -> Request:
    return Request(name, [1] * tokens, cache_salt=tenant or None)


def waiting(step: int, *requests: Request) -> WaitingContext:
    return WaitingContext(waiting=requests, step=step, free_blocks=9, policy="fcfs")


def admission(of: Request, free_blocks: int) -> AdmissionContext:
    return AdmissionContext(
        request=of,
        step=1,
        num_running=1,
        num_waiting=2,
        free_blocks=free_blocks,
        num_blocks=8,
        policy="fcfs",
    )


A = [request(f"a{i}", "a") for i in range(3)]
B = [request(f"b{i}", "b") for i in range(2)]
PUBLIC = request("p")


def test_tenants_take_turns() -> None:
    order = FairShare().kvp_choose_waiting_order(waiting(1, *A, *B, PUBLIC))
    assert order == ["a0", "b0", "p", "a1", "b1", "a2"]


def test_who_was_served_less_is_next() -> None:
    fair = FairShare()
    fair.kvp_choose_waiting_order(waiting(1, *A, *B))
    assert fair.kvp_choose_waiting_order(waiting(2, *A[1:], *B))[0] == "b0"
    # Who comes new has nothing to catch up.
    order = fair.kvp_choose_waiting_order(waiting(3, *A[1:], *B, PUBLIC))
    assert order == ["b0", "p", "a1", "b1", "a2"]


def test_nobody_is_overtaken_for_ever() -> None:
    fair = FairShare(most_steps=10)
    old = request("old", "a")
    for step in range(1, 11):
        new = request(f"new{step}", f"tenant {step}")
        order = fair.kvp_choose_waiting_order(waiting(step, new, old))
        assert order == [new.request_id, "old"]
    assert fair.kvp_choose_waiting_order(waiting(11, B[0], old)) == ["old", "b0"]


def test_accounts_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "MOST_TENANTS", 3)
    fair = FairShare()
    for i in range(20):
        fair.kvp_choose_waiting_order(waiting(i + 1, request(f"r{i}", f"tenant {i}")))
    assert len(fair._served) == 3


def test_the_last_blocks_are_of_the_tenant_whose_turn_it_is() -> None:
    fair = FairShare(reserve=0.25)
    fair.kvp_choose_waiting_order(waiting(1, *A, *B))
    assert fair.kvp_choose_admission(admission(B[0], free_blocks=2))
    assert not fair.kvp_choose_admission(admission(B[0], free_blocks=1))
    assert fair.kvp_choose_admission(admission(A[0], free_blocks=1))


def test_the_tenant_that_was_served_most_gives_way_but_the_first_request_is_safe() -> (
    None
):
    fair = FairShare()
    fair.kvp_choose_waiting_order(waiting(1, *A, *B, PUBLIC))
    fair.kvp_choose_waiting_order(waiting(2, A[2], B[1], PUBLIC))  # a had two, b one

    def victim(*running: Request) -> str:
        ctx = VictimContext(needy=A[0], candidates=running, policy="fcfs")
        return fair.kvp_choose_victim(ctx)

    assert victim(PUBLIC, A[0], A[1], B[0]) == "a1"
    assert victim(A[0], A[1], B[0]) == "a1"
    assert victim(A[0], PUBLIC, B[0]) == "b0"
    assert victim(A[0]) == "a0"


def test_a_request_is_paid_for_once() -> None:
    fair = FairShare()
    lost = request("lost", "a")
    fair.kvp_choose_waiting_order(waiting(1, lost, B[0]))
    for step in range(2, 9):
        fair.kvp_choose_waiting_order(waiting(step, B[0]))
        lost.num_preemptions += 1
        fair.kvp_choose_waiting_order(waiting(step, lost, B[0]))
    assert fair._served == {"b": 0, "a": lost.num_tokens}


def test_who_was_served_least_ends_though_others_come_for_ever() -> None:
    lab = Lab(
        [SPEC],
        24,
        hooks=Hooks.of(FairShare(most_steps=50)),
        max_num_seqs=12,
        long_prefill_token_threshold=16,
        max_num_batched_tokens=64,
    )

    def fill() -> None:
        while len(lab.scheduler.requests) < 14:
            n = len(lab.requests)
            lab.add([2000 + n] * 5, 16 + n % 3, cache_salt="bcd"[n % 3])

    for _ in range(9):
        fill()
        lab.step()
    modest = lab.add(range(56), 4, cache_salt="a")
    for _ in range(300):
        fill()
        lab.step()
        if modest in lab.reasons:
            break
    assert modest in lab.reasons


def test_the_installed_object_is_a_plugin() -> None:
    hooks = Hooks.of(plugin)
    assert hooks.orders_waiting
    assert hooks.chooses_admission
    assert hooks.chooses_victim


def serve(hooks: Hooks) -> tuple[Lab, list[str]]:
    """Ten requests of a greedy tenant, then one of another; in order of their end."""
    lab = Lab([SPEC], 12, hooks=hooks, hash_format=get_hash_format(), max_num_seqs=2)
    prompts: Sequence[tuple[str, int]] = [("greedy", i) for i in range(10)] + [("b", 0)]
    for tenant, i in prompts:
        lab.add([i] * 9, 6, cache_salt=tenant)
    lab.drain()  # judges the outputs
    return lab, list(lab.reasons)


def test_a_modest_tenant_is_not_last_and_everybody_is_answered() -> None:
    plain, order = serve(Hooks.of())
    fair, fair_order = serve(Hooks.of(FairShare()))
    assert order[-1] == "r10"
    assert fair_order.index("r10") < 3
    assert fair.outputs == plain.outputs
