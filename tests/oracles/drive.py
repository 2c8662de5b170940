"""A small random engine that writes down all that a KVCacheManager answers.

It runs the same under ours and under vLLM's managers, since both have the same names;
as long as the answers are equal, so are all later decisions, and the first difference
shows in the transcript.
"""

from dataclasses import dataclass, field
from random import Random
from typing import Any


@dataclass(frozen=True)
class Setup:
    """One run. Groups are described as in `vllm_core`."""

    groups: list[tuple[str, dict[str, Any]]]
    num_blocks: int
    hash_block_size: int
    seed: int
    steps: int = 60
    max_model_len: int = 256
    budget: int = 48
    use_eagle: bool = False
    lookahead: int = 0
    drafts: int = 0
    external: bool = False
    events: bool = False
    enable_caching: bool = True
    encoder_tokens: int = 0
    chunk_multiple: int = 1
    """Steps of a prefill end at multiples of this (states are kept there)."""
    admission: bool = True
    evictions: bool = False


@dataclass
class _State:
    request: Any
    prompt_len: int
    limit: int
    external: int = 0
    loading: bool = False
    extra: dict[str, Any] = field(default_factory=dict)


class Driver:
    """The engine. `make_request(id, tokens)` gives a hashed request."""

    def __init__(self, setup: Setup, manager: Any, make_request: Any) -> None:
        self.setup = setup
        self.kv = manager
        self.make_request = make_request
        self.random = Random(setup.seed)
        self.waiting: list[_State] = []
        self.running: list[_State] = []
        self.loading: list[_State] = []
        self.log: list[tuple[Any, ...]] = []
        self.count = 0
        self.families = [
            [self.random.randrange(100) for _ in range(setup.max_model_len)]
            for _ in range(3)
        ]

    def run(self) -> list[tuple[Any, ...]]:
        """The transcript."""
        for _ in range(self.setup.steps):
            self.step()
        for state in [*self.running, *self.loading]:
            self.kv.free(state.request)
        self.note("end", self.free_blocks(), self.events())
        self.note("reset", self.kv.reset_prefix_cache(), self.events())
        return self.log

    def note(self, *entry: Any) -> None:
        self.log.append(entry)

    def step(self) -> None:
        self.kv.new_step_starts()
        if self.random.random() < 0.6:
            self.arrive()
        self.finish_loads()
        scheduled, preempted = self.schedule_running()
        if not preempted:
            self.admit(scheduled)
        self.note("zero", sorted(self.kv.take_new_block_ids()))
        self.execute(scheduled)
        if self.setup.evictions and self.random.random() < 0.1:
            self.evict()
        self.note("free", self.free_blocks(), round(self.kv.usage, 9), self.events())
        if self.running:
            some = self.random.choice(self.running).request.request_id
            self.note("common", self.kv.get_num_common_prefix_blocks(some))

    def arrive(self) -> None:
        random, setup = self.random, self.setup
        shared = random.choice(self.families)[: random.randrange(setup.max_model_len)]
        tail = [random.randrange(100) for _ in range(random.randrange(1, 20))]
        tokens = (shared + tail)[: setup.max_model_len - 24]
        self.count += 1
        request = self.make_request(f"r{self.count}", tokens)
        limit = min(len(tokens) + random.randrange(1, 24), setup.max_model_len)
        self.waiting.append(_State(request, len(tokens), limit))
        self.note("hashes", [bytes(h).hex() for h in request.block_hashes])

    def chunk(self, state: _State, start: int, budget: int) -> int:
        """New tokens of a step from `start`."""
        left = state.request.num_tokens - start
        n = min(left, budget)
        multiple = self.setup.chunk_multiple
        last = state.request.num_tokens // multiple * multiple
        if start + n < last:
            return n // multiple * multiple
        return last - start if start < last < start + n else n

    def schedule_running(self) -> tuple[list[tuple[_State, int, int]], bool]:
        scheduled: list[tuple[_State, int, int]] = []
        preempted = False
        for state in list(self.running):
            if state not in self.running:
                continue
            request = state.request
            decoding = request.num_computed_tokens >= request.num_tokens - 1
            drafts = 0
            if decoding:
                room = self.setup.max_model_len - 1 - request.num_tokens
                drafts = min(self.random.randint(0, self.setup.drafts), max(room, 0))
                n = request.num_tokens - request.num_computed_tokens + drafts
            else:
                n = self.chunk(state, request.num_computed_tokens, self.setup.budget)
            if n <= 0:
                continue
            while True:
                blocks = self.kv.allocate_slots(
                    request, n, num_lookahead_tokens=self.setup.lookahead
                )
                self.note("run", request.request_id, n, ids(blocks))
                if blocks is not None:
                    scheduled.append((state, n, drafts))
                    break
                preempted = True
                victim = self.running.pop()
                scheduled = [entry for entry in scheduled if entry[0] is not victim]
                self.preempt(victim)
                if victim is state:
                    break
        return scheduled, preempted

    def preempt(self, victim: _State) -> None:
        self.kv.free(victim.request)
        victim.request.num_computed_tokens = 0
        victim.request.num_preemptions += 1
        self.waiting.insert(0, victim)
        self.note("preempt", victim.request.request_id)

    def admit(self, scheduled: list[tuple[_State, int, int]]) -> None:
        budget = self.setup.budget
        while self.waiting and len(self.running) < 6:
            state = self.waiting[0]
            request = state.request
            blocks, hit = self.kv.get_computed_blocks(request)[:2]
            self.note(
                "lookup",
                request.request_id,
                hit,
                ids(blocks),
                [
                    [
                        None if b.block_hash is None else bytes(b.block_hash).hex()
                        for b in group
                    ]
                    for group in blocks.blocks
                ],
            )
            external = self.external_tokens(request, hit)
            n = 0 if external else self.chunk(state, hit, budget)
            if not n and not external:
                return
            if self.setup.admission:
                fits = self.kv.can_fit_full_sequence(
                    request, hit, blocks, external, self.setup.encoder_tokens
                )
                self.note("fits", fits)
                if not fits:
                    return
            new = self.kv.allocate_slots(
                request,
                n,
                hit,
                blocks,
                num_lookahead_tokens=0,
                num_external_computed_tokens=external,
                delay_cache_blocks=bool(external),
                num_encoder_tokens=self.setup.encoder_tokens,
            )
            self.note(
                "admit",
                request.request_id,
                n,
                external,
                ids(new),
                self.kv.get_block_ids(request.request_id),
            )
            if new is None:
                return
            self.waiting.pop(0)
            request.num_computed_tokens = hit + external
            if external:
                self.loading.append(state)
            else:
                self.running.append(state)
                scheduled.append((state, n, 0))
            budget -= n
            if budget <= 0:
                return

    def external_tokens(self, request: Any, hit: int) -> int:
        if not self.setup.external or self.random.random() < 0.6:
            return 0
        unit = max(fields["block_size"] for _, fields in self.setup.groups)
        room = (request.num_tokens - 1 - hit) // unit
        return self.random.randint(0, room) * unit if room > 0 and not hit % unit else 0

    def finish_loads(self) -> None:
        for state in list(self.loading):
            if self.random.random() < 0.5:
                self.loading.remove(state)
                request = state.request
                self.kv.cache_blocks(request, request.num_computed_tokens)
                self.running.append(state)
                self.note("loaded", request.request_id)

    def execute(self, scheduled: list[tuple[_State, int, int]]) -> None:
        for state, n, drafts in scheduled:
            request = state.request
            request.num_computed_tokens += n
            if request.num_computed_tokens < request.num_tokens:
                continue
            accepted = self.random.randint(0, drafts)
            request.num_computed_tokens -= drafts - accepted
            for _ in range(accepted + 1):
                request.append_output_token_ids(self.random.randrange(100))
            done = request.num_tokens >= state.limit or self.random.random() < 0.05
            if done and state in self.running:
                self.running.remove(state)
                self.kv.free(request)
                self.note("finish", request.request_id)

    def evict(self) -> None:
        if not self.running:
            return
        rows = self.kv.get_block_ids(
            self.random.choice(self.running).request.request_id
        )
        some = {block for block in rows[0][-3:] if block}
        self.kv.evict_blocks(some)
        self.note("evict", sorted(some))

    def free_blocks(self) -> int:
        return int(self.kv.block_pool.get_num_free_blocks())

    def events(self) -> list[tuple[Any, ...]]:
        return [flat(event) for event in self.kv.take_events()]


def ids(blocks: Any) -> Any:
    """Block ids, or None."""
    return None if blocks is None else blocks.get_block_ids()


def flat(event: Any) -> tuple[Any, ...]:
    """What both versions tell in an event."""
    names = (
        "block_hashes",
        "group_idx",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "medium",
        "lora_name",
        "extra_keys",
    )
    return (type(event).__name__, *(_plain(getattr(event, n, None)) for n in names))


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, list | tuple) else value
