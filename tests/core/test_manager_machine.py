"""Whatever requests do, in whatever order, the manager does what the model does."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvplugin.events import AllBlocksCleared, BlockRemoved, BlockStored
from kvplugin.policies.eviction import LRU, EvictionPolicy
from kvplugin.request import Adapter, Request
from tests.core.eviction_faults import RandomPolicy
from tests.core.manager_setups import (
    Setup,
    chunk,
    full,
    mamba,
    mla,
    model_of,
    window,
)
from tests.core.naive_manager import NaiveManager, Prefix

FAMILIES = [[7 * i % 5 for i in range(64)], [3 * i % 7 for i in range(64)]]
IDENTITIES: list[dict[str, Any]] = [{}, {}, {"cache_salt": "x"}]
IDENTITIES.append({"lora_request": Adapter("x")})


class ManagerMachine(RuleBasedStateMachine):
    """A manager, a model of it, and an engine that runs one request at a time."""

    def __init__(self, setup: Setup, policy: EvictionPolicy) -> None:
        super().__init__()
        self.setup = setup
        self.kv = setup.manager(policy, enable_kv_cache_events=True)
        groups = [model_of(spec) for spec in setup.specs]
        self.model = NaiveManager(groups, setup.num_blocks, setup.drafts)
        self.step_size = max((g.block_size for g in groups if g.is_state), default=1)
        self.most_drafts = min((g.drafts for g in groups if g.is_state), default=3)
        self.aligned = any(g.kind == "last_state" for g in groups)
        self.waiting: list[Request] = []
        self.loading: list[Request] = []
        self.running: list[Request] = []
        self.identities: dict[str, Any] = {}
        self.prefix_of: dict[bytes, Prefix] = {}
        self.listener: set[tuple[int, int | None]] = set()
        self.count = 0

    def prefix(self, request: Request) -> Callable[[int], Prefix]:
        identity = self.identities[request.request_id]
        return lambda n: (identity, *request.all_token_ids[:n])

    def learn(self, request: Request) -> None:
        for i, block_hash in enumerate(request.block_hashes, 1):
            mine = self.prefix(request)(i * self.setup.hash_block_size)
            assert self.prefix_of.setdefault(block_hash, mine) == mine

    # -- what requests do ----------------------------------------------------------

    @precondition(lambda self: len(self.waiting) < 3)
    @rule(
        family=st.integers(0, len(FAMILIES) - 1),
        shared=st.integers(0, 40),
        own=st.lists(st.integers(0, 2), min_size=1, max_size=3),
        identity=st.integers(0, len(IDENTITIES) - 1),
    )
    def arrive(self, family: int, shared: int, own: list[int], identity: int) -> None:
        self.count += 1
        tokens = FAMILIES[family][:shared] + own
        request = self.setup.request(f"r{self.count}", tokens, **IDENTITIES[identity])
        self.identities[request.request_id] = str(IDENTITIES[identity])
        self.learn(request)
        self.waiting.append(request)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def admit(self, data: Any) -> None:
        self.look_up(data, data.draw(st.sampled_from(self.waiting), "admit"))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def serve(self, data: Any) -> None:
        """From arrival to end: what fills a pool with keys."""
        request = self.waiting[-1]
        self.look_up(data, request)
        while request in self.running and request.num_computed_tokens < 40:
            self.take_a_step(data, request)
        if request in self.running:
            self.leave(request)

    def look_up(self, data: Any, request: Request) -> None:
        model, name, prefix = self.model, request.request_id, self.prefix(request)
        blocks, hit = self.kv.get_computed_blocks(request)
        hits = blocks.get_block_ids()
        assert hit == model.longest_hit(prefix, request.num_tokens - 1)
        model.assert_serves(hits, prefix, hit)
        unborn = any(
            row and model.keys.get(row[-1]) in model.fresh_states for row in hits
        )
        if not model.holders and not unborn:
            self.fits_into_an_idle_pool(request, blocks, hit)
        external = self.draw_external(data, request, hit)
        delayed = bool(external) and data.draw(st.booleans(), "delayed")
        n = 0 if delayed else self.draw_chunk(data, request, hit + external)
        if not n and not delayed:
            return
        main = hit + external + n
        needed = model.need(name, hits, hit + external, main, main)
        new = self.kv.allocate_slots(
            request,
            n,
            hit,
            blocks,
            num_external_computed_tokens=external,
            delay_cache_blocks=delayed,
        )
        assert (new is not None) == (needed <= model.free and not unborn)
        if new is None:
            assert self.kv.get_block_ids(name) == tuple([] for _ in hits)
            return
        self.waiting.remove(request)
        identity = self.identities[name]
        model.admit(name, identity, request.all_token_ids, hit, hit + external)
        self.receive(request, hits, main, main)
        request.num_computed_tokens = hit + external
        if delayed:
            self.loading.append(request)
            return
        self.running.append(request)
        model.key(name, main)
        if external:
            model.write(name, hit, hit + external, is_step=False)
        self.run(data, request, main)

    def fits_into_an_idle_pool(self, request: Request, blocks: Any, hit: int) -> None:
        """What is cached takes nothing from a request that has the pool for itself."""
        groups = self.model.groups
        budget = self.setup.budget or self.setup.max_model_len
        most = sum(
            min(
                g.row_length(request.num_tokens, request.num_tokens),
                g.most_live(budget, self.setup.max_model_len),
            )
            for g in groups
        )
        if most < self.setup.num_blocks:
            assert self.kv.can_fit_full_sequence(request, hit, blocks)

    def draw_external(self, data: Any, request: Request, hit: int) -> int:
        room = (request.num_tokens - 1 - hit) // self.model.alignment
        if self.aligned or room < 1:
            return 0
        return data.draw(st.integers(0, room), "external") * self.model.alignment

    def draw_chunk(self, data: Any, request: Request, start: int) -> int:
        """Tokens of a step from `start`; states want it to end with a block."""
        left = request.num_tokens - start
        n = data.draw(st.integers(1, min(left, self.setup.budget or left)), "chunk")
        last = request.num_tokens // self.step_size * self.step_size
        if start + n < last:
            return n // self.step_size * self.step_size
        return last - start if start < last < start + n else n

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def advance(self, data: Any) -> None:
        self.take_a_step(data, data.draw(st.sampled_from(self.running), "advance"))

    def take_a_step(self, data: Any, request: Request) -> None:
        self.kv.new_step_starts()
        self.model.fresh_states.clear()
        start, drafts = request.num_computed_tokens, 0
        left = request.num_tokens - start
        if left == 1:
            room = self.setup.max_model_len - request.num_tokens - 1
            if room < 1:
                self.leave(request)
                return
            most = min(self.most_drafts, room - 1)
            drafts = data.draw(st.integers(0, most), "drafts")
            n = 1 + drafts
        else:
            n = self.draw_chunk(data, request, start)
        if n:
            lookahead = data.draw(st.integers(0, 3), "lookahead")
            self.step(data, request, n, drafts, lookahead)

    def step(
        self, data: Any, request: Request, n: int, drafts: int, lookahead: int
    ) -> None:
        model, name = self.model, request.request_id
        start = request.num_computed_tokens
        main, slots = start + n, min(start + n + lookahead, self.setup.max_model_len)
        assert model.reads(name, start)
        model.give_back(name, start)
        if self.aligned:  # which states are given back is theirs to say
            self.kv.remove_skipped_blocks(name, start)
            model.receive(name, self.kv.get_block_ids(name), [])
        needed, free = model.need(name, [], start, main, slots), model.free
        new = self.kv.allocate_slots(request, n, num_lookahead_tokens=lookahead)
        assert (new is not None) == (needed <= free)
        if new is None:
            self.receive(request, [], 0, 0)
            self.preempt(data)
            return
        before = [len(row) for row in model.holders[name].rows]
        self.receive(request, [], main, slots)
        model.key(name, min(main, request.num_tokens))
        rows = self.kv.get_block_ids(name)
        added = [row[had:] for row, had in zip(rows, before, strict=True)]
        assert list(new.get_block_ids()) == added
        if drafts:
            accepted = data.draw(st.integers(0, drafts), "accepted")
            n -= drafts - accepted
            self.grow(data, request, accepted)
        self.run(data, request, start + n)

    def grow(self, data: Any, request: Request, n: int) -> None:
        few = st.lists(st.integers(0, 2), min_size=n, max_size=n)
        request.append_output_token_ids(data.draw(few, "tokens"))
        self.learn(request)

    def receive(self, request: Request, hits: Any, main: int, slots: int) -> None:
        """The rows are those that the model wants."""
        model, name = self.model, request.request_id
        holder, rows = model.holders[name], self.kv.get_block_ids(name)
        before = [len(row) for row in holder.rows]
        model.receive(name, rows, hits)
        for g, group in enumerate(model.groups):
            row, nulls = rows[g], holder.nulls[g]
            adopted = len(hits[g]) if hits else 0
            length = max(before[g], adopted, nulls, group.row_length(slots, main))
            assert len(row) == (length if slots else before[g])
            if group.kind == "last_state":
                live = [block for block in row if block]
                # With drafts one more: it is settled a step later that they are.
                most = 2 + group.drafts + (group.drafts > 0)
                assert len(live) == len(set(live)) <= most
                holder.allocated |= slots > 0
            else:
                assert all((i < nulls) == (not block) for i, block in enumerate(row))

    def run(self, data: Any, request: Request, main: int) -> None:
        """The step is computed."""
        model, name = self.model, request.request_id
        start = request.num_computed_tokens
        assert model.reads(name, start)
        model.write(name, start, main, is_step=True)
        request.num_computed_tokens = main
        if main == request.num_tokens:
            self.grow(data, request, 1)

    @precondition(lambda self: self.loading)
    @rule(data=st.data())
    def load_ends(self, data: Any) -> None:
        request = data.draw(st.sampled_from(self.loading), "loaded")
        name, computed = request.request_id, request.num_computed_tokens
        self.model.write(
            name, self.model.holders[name].keyed_to, computed, is_step=False
        )
        self.kv.cache_blocks(request, computed)
        self.model.key(name, computed)
        self.loading.remove(request)
        self.running.append(request)

    @precondition(lambda self: self.running or self.loading)
    @rule(data=st.data())
    def end(self, data: Any) -> None:
        self.leave(data.draw(st.sampled_from(self.running + self.loading), "end"))

    def leave(self, request: Request) -> None:
        self.kv.free(request)
        del self.model.holders[request.request_id]
        for queue in (self.running, self.loading):
            if request in queue:
                queue.remove(request)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data: Any) -> None:
        self.put_back(data.draw(st.sampled_from(self.running), "victim"))

    def put_back(self, request: Request) -> None:
        self.leave(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.waiting.insert(0, request)

    # -- what happens to the cache -------------------------------------------------

    @precondition(lambda self: self.model.fresh_states)
    @rule()
    def new_step_starts(self) -> None:
        self.kv.new_step_starts()
        self.model.fresh_states.clear()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def bytes_are_wrong(self, data: Any) -> None:
        """Evict all that is wrong; who holds some of it goes back or starts anew."""
        model = self.model
        names = {r.request_id: r for r in self.running + self.loading}
        first = data.draw(st.sampled_from(self.running), "wrong").request_id
        computed = names[first].num_computed_tokens
        position = data.draw(st.integers(0, max(computed - 1, 0)), "from")
        spoilt, before = model.spoil(first, position), set()
        while spoilt != before:
            before = set(spoilt)
            for name in names:
                wrong = model.first_spoilt(name)
                if wrong is not None:
                    spoilt |= model.spoil(name, wrong)
        self.kv.evict_blocks(spoilt)
        model.drop_keys(spoilt)
        for name, request in names.items():
            wrong = model.first_spoilt(name)
            if wrong is None or wrong >= request.num_computed_tokens:
                continue
            back = data.draw(st.integers(0, wrong), "back")
            back -= back % self.step_size
            stays = request in self.running and not self.aligned
            if stays and model.can_go_back(name, back):
                states = model.states_behind(name, back)
                self.kv.evict_blocks(states)
                model.drop_keys(states)
                request.num_computed_tokens = back
                holder = model.holders[name]
                holder.keyed_to = min(holder.keyed_to, back)
            else:
                self.put_back(request)

    @precondition(lambda self: len(self.model.keys) > self.setup.num_blocks // 2)
    @rule(blocks=st.sets(st.integers(1, 39), min_size=1, max_size=4))
    def lose_keys(self, blocks: set[int]) -> None:
        blocks = {block for block in blocks if block < self.setup.num_blocks}
        self.kv.evict_blocks(blocks)
        self.model.drop_keys(blocks)

    @precondition(lambda self: len(self.model.keys) > self.setup.num_blocks // 2)
    @rule()
    def reset(self) -> None:
        idle = not self.model.holders
        assert self.kv.reset_prefix_cache() is idle
        if idle:
            self.model.keys.clear()

    # -- what holds after each of it -----------------------------------------------

    @invariant()
    def manager_is_sound(self) -> None:
        self.kv.check()
        assert self.kv.block_pool.policy_failures == 0

    @invariant()
    def blocks_are_counted(self) -> None:
        usable, free = self.setup.num_blocks - 1, self.model.free
        assert self.kv.block_pool.get_num_free_blocks() == free
        assert self.kv.usage == pytest.approx(1 - free / usable)
        assert 0 <= self.kv.usage <= 1
        if not self.model.holders:
            assert self.kv.usage == 0

    @invariant()
    def keys_are_those_of_the_model(self) -> None:
        found = {}
        for block in range(self.setup.num_blocks):
            key = self.kv.block_pool.key_of(block)
            if key is not None:
                found[block] = (key[-1], self.prefix_of[key[:-4]])
        assert found == self.model.keys

    @invariant()
    def keyed_blocks_hold_what_their_key_says(self) -> None:
        for block, key in self.model.keys.items():
            assert self.model.bytes[block] == key

    @invariant()
    def listener_knows_the_index(self) -> None:
        for event in self.kv.take_events():
            match event:
                case BlockStored():
                    self.listener |= {(h, event.group_idx) for h in event.block_hashes}
                case BlockRemoved():
                    self.listener -= {(h, event.group_idx) for h in event.block_hashes}
                case AllBlocksCleared():
                    self.listener.clear()
        keys = map(self.kv.block_pool.key_of, self.model.keys)
        assert self.listener == {
            (int.from_bytes(key[-12:-4], "big"), key[-1]) for key in keys if key
        }


ALONE = {
    "full": Setup((full(),), 13),
    "mla": Setup((mla(),), 13),
    "window": Setup((window(6),), 13),
    "window of whole blocks": Setup((window(9),), 12, budget=16),
    "chunk": Setup((chunk(8),), 13),
    "chunk across blocks": Setup((chunk(6),), 12, budget=16),
    "states": Setup((mamba("all"),), 13),
    "states with drafts": Setup((mamba("all", drafts=2),), 16),
    "last state": Setup((mamba("align"),), 12),
    "last state with drafts": Setup((mamba("align", drafts=2),), 16),
    "full, drafts": Setup((full(),), 13, drafts=True),
    "window, drafts": Setup((window(6),), 13, drafts=True),
}
TOGETHER = {
    "full, window": Setup((full(), window(9)), 22, budget=16),
    "full, coarse window": Setup((full(2), window(9, 4)), 26, 2),
    "coarse full, window": Setup((full(8), window(6, 4)), 16),
    "window, chunk": Setup((window(6), chunk(8)), 20),
    "full, states": Setup((full(), mamba("all", 8)), 16),
    "full, last state": Setup((full(), mamba("align", 8)), 16),
    "two of one spec": Setup((full(), window(6), window(6)), 26),
    "full, two windows": Setup((full(), window(5), window(13)), 28),
    "full, window, states": Setup((full(), window(6), mamba("all")), 28),
    "full, coarse windows": Setup((full(2), window(7, 4), window(12, 8)), 28, 2),
    "full, window, drafts": Setup((full(), window(9)), 20, drafts=True),
    "sizes, drafts": Setup((full(2), window(7, 4)), 26, 2, drafts=True),
    "two windows, drafts": Setup((full(), window(5), window(13)), 28, drafts=True),
    "states, drafts": Setup((full(), mamba("all", 8, 2)), 20, drafts=True),
}
SETUPS = ALONE | TOGETHER


def run(
    setup: Setup, make_policy: Callable[[], EvictionPolicy], examples: int, steps: int
) -> None:
    run_state_machine_as_test(
        lambda: ManagerMachine(setup, make_policy()),
        settings=settings(
            max_examples=examples, stateful_step_count=steps, deadline=None
        ),
    )


@pytest.mark.parametrize("name", SETUPS)
def test_manager_does_what_the_model_does(name: str) -> None:
    run(SETUPS[name], LRU, examples=30, steps=40)


@pytest.mark.parametrize("name", ["full", "full, two windows", "full, states"])
def test_any_victim_will_do(name: str) -> None:
    run(SETUPS[name], partial(RandomPolicy, 1), examples=30, steps=40)


@pytest.mark.full
@pytest.mark.parametrize("name", SETUPS)
@pytest.mark.parametrize("make_policy", [LRU, partial(RandomPolicy, 2)])
def test_manager_does_what_the_model_does_for_long(
    name: str, make_policy: Callable[[], EvictionPolicy]
) -> None:
    run(SETUPS[name], make_policy, examples=150, steps=60)
