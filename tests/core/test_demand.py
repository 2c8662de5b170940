"""What waiting requests want, against a model that keeps everything."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplugin.demand import Demand, HitKeys
from kvplugin.hashing import make_key
from kvplugin.policies.eviction import LRU
from kvplugin.request import Request
from kvplugin.scheduler import Scheduler, SchedulerConfig
from kvplugin.testing import Lab
from tests.core.manager_setups import FORMAT, Setup, full, mamba, window


class Listens(LRU):
    """LRU that wants to hear of steps, and believes nothing that cannot be."""

    needs_steps = True

    def __init__(self) -> None:
        super().__init__()
        self.wanted: Counter[bytes] = Counter()
        self.times: list[float] = []

    def step(self, now: float, soon: Any, dropped: Any) -> None:
        self.times.append(now)
        self.wanted.update(soon)
        for key, n in dropped.items():
            assert 0 < n <= self.wanted[key]
            self.wanted[key] -= n
        self.wanted = +self.wanted


def listening(specs: Any, **settings: Any) -> tuple[Any, Listens]:
    """A manager whose policy listens."""
    policy = Listens()
    return Setup(tuple(specs)).manager(policy, **settings), policy


def keys_of(
    request: Request, group: int, pieces: int = 1, most: int = 99
) -> list[bytes]:
    """Of all full blocks of `pieces` hashes, less the last token."""
    hashes = request.block_hashes
    blocks = min((request.num_tokens - 1) // (4 * pieces), most)
    return [make_key(hashes[(i + 1) * pieces - 1], group) for i in range(blocks)]


# -- the account -------------------------------------------------------------------

ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "remove", "take", "change", "renew"]),
        st.integers(0, 4),
    ),
    max_size=60,
)


@settings(deadline=None, max_examples=200)
@given(ACTIONS, st.lists(st.lists(st.integers(0, 5)), min_size=5, max_size=5))
def test_the_changes_add_up_to_what_is_wanted(
    actions: list[tuple[str, int]], keys: list[list[int]]
) -> None:
    requests: list[Any] = [Request(f"r{i}", [1]) for i in range(5)]
    now = {f"r{i}": [bytes([key]) for key in own] for i, own in enumerate(keys)}
    demand = Demand(lambda request: list(now[request.request_id]))
    waiting: dict[str, list[bytes]] = {}
    told: Counter[bytes] = Counter()
    for action, i in [*actions, ("take", 0)]:
        request, id_ = requests[i], f"r{i}"
        if action == "add" and id_ not in waiting:
            demand.add(request)
            waiting[id_] = list(now[id_])
        elif action == "remove":
            demand.remove(request)
            waiting.pop(id_, None)
        elif action == "change":
            now[id_] = [*now[id_], bytes([9])]
        elif action == "renew":
            demand.renew(requests)
            waiting = {id_: list(now[id_]) if waiting[id_] else [] for id_ in waiting}
        elif action == "take":
            change = demand.take()
            assert not {*change.soon} & change.dropped.keys()
            assert all(n > 0 for n in change.dropped.values())
            told.update(change.soon)
            told.subtract(change.dropped)
            assert +told == Counter(key for own in waiting.values() for key in own)
            assert min(told.values(), default=0) >= 0
    assert demand.take() == ([], {})


def test_who_comes_and_goes_counts_nothing() -> None:
    demand = Demand(lambda request: [b"a", b"b"])
    request: Any = Request("r", [1])
    demand.add(request)
    demand.remove(request)
    demand.remove(request)
    assert demand.take() == ([], {})


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=60))
def test_only_so_many_requests_are_followed(actions: list[tuple[bool, int]]) -> None:
    """Those that began to wait first, as far as they want something."""
    requests: list[Any] = [Request(f"r{i}", [1]) for i in range(10)]
    demand = Demand(
        lambda r: [r.request_id.encode()] if r is not requests[0] else [], 3
    )
    waiting: list[int] = []
    followed: list[int] = []
    told: Counter[bytes] = Counter()
    for comes, i in actions:
        if comes and i not in waiting:
            waiting.append(i)
            demand.add(requests[i])
        elif not comes:
            waiting = [j for j in waiting if j != i]
            demand.remove(requests[i])
        followed = [j for j in followed if j in waiting]
        others = [j for j in waiting if j and j not in followed]
        followed += others[: 3 - len(followed)]
        change = demand.take()
        told.update(change.soon)
        told.subtract(change.dropped)
        assert +told == Counter(f"r{j}".encode() for j in followed)


# -- which keys --------------------------------------------------------------------


def test_keys_are_those_of_the_pool_in_every_group() -> None:
    kv, _ = listening([full(), window(8, 8)])
    request = Setup((full(),)).request("r", range(16))
    # The last token is computed in any case: its block is no hit.
    wanted = [*keys_of(request, 0), *keys_of(request, 1, pieces=2)]
    assert HitKeys(kv)(request) == wanted
    assert len(wanted) == 3 + 1


def test_so_many_blocks_are_followed_and_no_more() -> None:
    kv, _ = listening([full(), window(8)])
    request = Setup((full(),)).request("r", range(40))
    wanted = [*keys_of(request, 0, most=2), *keys_of(request, 1, most=2)]
    assert HitKeys(kv, most_blocks=2)(request) == wanted


def test_nothing_is_followed_where_nothing_can_come_of_it() -> None:
    setup = Setup((full(),))
    request = setup.request("r", range(16))
    kv, _ = listening([full()])
    assert HitKeys(kv)(request)
    skips = setup.request("skips", range(16), skip_reading_prefix_cache=True)
    assert HitKeys(kv)(skips) == []
    assert HitKeys(setup.manager())(request) == []  # LRU does not listen
    kv, _ = listening([full()], enable_caching=False)
    assert HitKeys(kv)(request) == []


# -- the scheduler -----------------------------------------------------------------


class ListeningLab(Lab):
    """Compares, after each step, what the policy heard with who waits."""

    def __init__(self, specs: Any, usable: int, **settings: Any) -> None:
        super().__init__(specs, usable, hash_format=FORMAT, **settings)
        self.policy = Listens()
        self.kv.block_pool._ranking._use(self.policy)
        self.most = 0

    def step(self) -> None:
        expected = Counter(
            key
            for entry in self.scheduler._roster.waiting
            for key in HitKeys(self.kv)(entry.request)
        )
        before = len(self.policy.times)
        super().step()
        if len(self.policy.times) > before:
            assert self.policy.wanted == expected
            self.most = max(self.most, len(expected))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    "specs", [(full(),), (full(), window(6)), (full(), mamba("all"))]
)
def test_the_policy_hears_at_each_step_who_waits(specs: Any, depth: int) -> None:
    lab = ListeningLab(specs, 12 * len(specs), depth=depth, max_num_seqs=3)
    for i in range(6):
        lab.add([*range(9), *[i] * i], 3 + i)
        lab.now += 1
        lab.step()
    lab.scheduler.abort_request("r4")
    lab.add(range(20), 2)
    if specs == (full(),):
        assert lab.scheduler.reset_prefix_cache(weight_epoch=1) in (True, False)
    lab.drain()
    assert lab.policy.times == sorted(lab.policy.times)
    assert lab.most
    lab.add([1], 1)
    lab.drain()
    assert not lab.policy.wanted


def test_a_policy_that_does_not_listen_hears_nothing() -> None:
    class Deaf(Listens):
        """Has no use for steps."""

        needs_steps = False

    policy = Deaf()
    kv = Setup((full(),)).manager(policy)
    scheduler = Scheduler(kv, SchedulerConfig())
    scheduler.add_request(Setup((full(),)).request("r", range(9)), max_tokens=1)
    scheduler.schedule()
    assert policy.times == []
    assert scheduler._roster.demand.take() == ([], {})
