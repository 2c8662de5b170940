"""Reuse-predicting eviction: the block that is least likely to be worth its place goes.

Conversations pause before they go on, so the latest blocks need not be the next ones
wanted, as LRU has it. This policy learns from the requests themselves when runs of
blocks come back (see hazard.py) and works on whole releases: a release is cut into the
last block, a prefix that several requests share, and the rest.
"""

from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import inf
from typing import Final

from kvplugin.errors import IntegrityError
from kvplugin.policies.eviction import hazard
from kvplugin.policies.eviction.base import BlockContext, BlockInfo
from kvplugin.policies.eviction.hazard import (
    LAST,
    NUM_CLASSES,
    NUM_SLOTS,
    SHARED,
    Learner,
    Rank,
)
from kvplugin.policies.eviction.reuse_runs import Cohort, Line, Run, continue_run

_SLACK: Final = 1024
"""Empty runs that are never worth a clean-up."""
_LEAST_MEMORY: Final = 4096
"""Keys that a small pool remembers; a large one remembers half as many as blocks."""
_NOWHERE: Final[Rank] = (inf, 0, -1)
_KEYS_PER_RUN: Final = 3
"""The deepest sampled ones, and one in the middle."""


_DEPTHS: Final = [*range(8), *(s << e for e in range(1, 28) for s in range(4, 8))]
"""Depths of which keys are remembered: four each time the depth doubles."""


class Reuse:
    """Evicts where hits are least likely for the time that a block would be kept.

    Blocks of one release go tail first, runs of one class and age by time of release.
    With nothing learned yet the order is nearly LRU's. Nothing is random.

    A request's turn is taken from the context where that has one, and otherwise from
    what the request hits: a request that hits most of an earlier one continues it, one
    that hits less shares a prefix with it.

    Memory: the keys of at most `max(4096, num_blocks / 2)` sampled blocks are
    remembered, evicted or not, at about 330 bytes each.
    """

    needs_steps = False

    def __init__(self) -> None:
        self._info: Callable[[int], BlockInfo]
        # Of each evictable block its run.
        self._run_of: list[Run | None] = []
        # By a block in use of the request; the block that was hit last, if any was.
        self._lines: dict[int, Line] = {}
        self._known: OrderedDict[bytes, Run] = OrderedDict()
        self._max_known = 0
        # Of the last pin its last block and the runs of all; None once it is settled
        # whether that was a hit.
        self._last_pin: tuple[int, list[Run]] | None = None
        self._learners: list[Learner] = []
        self._learner_of: dict[int, Learner] = {}
        # Index: slot of age.
        self._cohorts = [Cohort() for _ in range(NUM_SLOTS)]
        # Index: class. Slots by worth, the slot of new runs, how many runs have blocks.
        self._ranks: list[list[Rank]] = []
        self._youngest: list[Rank] = []
        self._num_live: list[int] = []
        # The slot of least worth that may have runs; to be searched once an epoch.
        self._best: list[Rank] = []
        self._is_searched = False
        self._releases = 0
        self._epoch = 0
        self._length = 0
        self._num_queued = 0

    def bind(self, num_blocks: int, info: Callable[[int], BlockInfo]) -> None:
        self._info = info
        self._run_of = [None] * num_blocks
        self._max_known = max(_LEAST_MEMORY, num_blocks // 2)

    # -- what requests do ----------------------------------------------------------

    def insert(self, ids: Sequence[int], ctx: BlockContext) -> None:
        """Blocks that were evicted and come again are hits to learn from."""
        if not ids:
            return
        info, known = self._info, self._known
        first = info(ids[0]).depth
        start = bisect_left(_DEPTHS, first)
        for depth in reversed(_DEPTHS[start : bisect_left(_DEPTHS, first + len(ids))]):
            block = ids[depth - first]
            run = known.get(info(block).key)
            if run is not None:
                hit = depth + 1
                self._lines[block] = continue_run(run, hit, ctx)
                self._count_hit(run, min(run.size - (run.end - hit), hit - first))
                return
        if ctx.turn or ctx.ends_session:
            self._lines[ids[0]] = Line(ctx.turn, 0, 0, ctx.ends_session)

    def hit(self, ids: Sequence[int], ctx: BlockContext) -> None:
        if not ids:
            return
        block = ids[-1]
        hit = self._info(block).depth + 1
        line = Line(ctx.turn, hit, hit, ctx.ends_session)
        if self._last_pin is not None and self._last_pin[0] in ids:
            deepest, runs = self._last_pin
            if deepest == block:  # else shared with a request that still runs
                line = continue_run(runs[-1], hit, ctx)
            for run in dict.fromkeys(runs):
                self._count_hit(run, runs.count(run))
            self._last_pin = None
        self._lines[block] = line

    def pin(self, ids: Sequence[int]) -> None:
        """A hit to learn from only if `hit` follows."""
        if not ids:
            return
        self._settle_last_pin()
        run_of = self._run_of
        runs = [run for block in ids if (run := run_of[block]) is not None]
        self._last_pin = ids[-1], runs
        self._leave(ids, runs)

    def release(self, ids: Sequence[int]) -> None:
        if not ids:
            return
        self._settle_last_pin()
        self._tick()
        info = self._info(ids[0])
        learner = self._learner_of.get(info.group) or self._meet(info.group)
        length = info.depth + 1
        # Leading blocks that are not released belong to others, too.
        elsewhere = max(0, length - len(ids))
        line = self._line(ids) or Line(0, elsewhere, elsewhere)
        cut = len(ids) - min(max(0, line.shared - elsewhere), len(ids))
        if cut < len(ids):
            prefix = ids[cut:]
            cls = learner.offset + SHARED
            self._remember(self._enter(prefix, cls, None, line, length - cut), prefix)
        apart = int(length > 1 and (learner.last_differs or self._is_probe()))
        if cut and apart:
            self._enter(ids[:1], learner.offset + LAST, None, line, length)
        body = ids[apart:cut]
        if body:
            traits = None
            cls = learner.offset  # the least class; nobody continues an ended session
            if not line.ended:
                traits = hazard.traits_of(line.turn, length - line.hit, length)
                cls = learner.class_of[traits]
                learner.released(traits)
            run = self._enter(body, cls, traits, line, length - apart)
            self._remember(run, body)

    def forget(self, ids: Sequence[int]) -> None:
        run_of = self._run_of
        for block in ids:
            self._lines.pop(block, None)
        gone = [block for block in ids if run_of[block] is not None]
        self._leave(gone, [run for block in gone if (run := run_of[block]) is not None])

    def step(
        self, now: float, soon: Iterable[bytes], dropped: Mapping[bytes, int]
    ) -> None:
        del now, soon, dropped

    # -- victims -------------------------------------------------------------------

    def victims(self, n: int) -> list[int]:
        if n > self._length:
            raise ValueError(f"{n} victims wanted, {self._length} evictable")
        if not self._is_searched:
            self._best = [self._search(cls, 0) for cls in range(len(self._ranks))]
            self._is_searched = True
        victims: list[int] = []
        while len(victims) < n:
            rank = _, slot, cls = min(self._best)
            runs = self._cohorts[-slot].runs[cls]
            self._take(runs, n, victims)
            if not runs:
                place = bisect_right(self._ranks[cls], rank)
                self._best[cls] = self._search(cls, place)
        run_of = self._run_of
        for block in victims:
            run_of[block] = None
        self._length -= n
        return victims

    def order(self) -> Iterator[int]:
        run_of = self._run_of
        for _, slot, cls in sorted(chain(*self._ranks)):
            for run in self._cohorts[-slot].runs.get(cls, ()):
                yield from (b for b in reversed(run.blocks) if run_of[b] is run)

    def __len__(self) -> int:
        return self._length

    def _search(self, cls: int, place: int) -> Rank:
        """Of the slots where a class has blocks, from a place on, the least worth."""
        if self._num_live[cls]:
            cohorts, ranks = self._cohorts, self._ranks[cls]
            for rank in ranks[place:]:
                if cohorts[-rank[1]].runs.get(cls):
                    return rank
        return _NOWHERE

    def _take(self, runs: deque[Run], n: int, victims: list[int]) -> None:
        """Add victims up to `n`, as long as there are some among these runs."""
        run_of = self._run_of
        while runs and len(victims) < n:
            run = runs[0]
            if run.live < len(run.blocks):
                run.blocks = [b for b in run.blocks if run_of[b] is run]
            wanted = n - len(victims)
            victims += run.blocks[: -wanted - 1 : -1]
            del run.blocks[-wanted:]
            self._num_live[run.cls] -= run.live > 0 and not run.blocks
            run.live = len(run.blocks)
            if not run.live:
                runs.popleft()
                self._num_queued -= 1

    # -- time ----------------------------------------------------------------------

    def _tick(self) -> None:
        self._releases += 1
        if not self._releases % hazard.EPOCH:
            self._epoch += 1
            self._age()
            if hazard.due(self._epoch):
                self._learn()
            self._is_searched = False
            if self._num_queued > 2 * sum(self._num_live) + _SLACK:
                self._drop_empty_runs()

    def _is_probe(self) -> bool:
        """Whether this release is one of the few that keep a rare class known."""
        return not self._releases % hazard.EPOCH

    def _age(self) -> None:
        """Each cohort moves on to the slot of its age; the old ones merge in pairs."""
        cohorts = self._cohorts
        arriving = Cohort()
        for level in range(hazard.LEVELS):
            first, last = hazard.first_slot(level), 3 * level + 5
            for slot in range(first, last + 1):
                self._count_survivals(slot, cohorts[slot])
            if self._epoch >> level & 1:
                cohorts[first : last + 1] = [arriving, *cohorts[first:last]]
                return
            later, older = cohorts[last - 1 : last + 1]
            self._count_survivals(last, later)
            older.absorb(later)
            cohorts[first : last + 1] = [
                arriving,
                *cohorts[first : last - 1],
                Cohort(),
            ]
            arriving = older
        cohorts[-1].absorb(arriving)

    def _count_survivals(self, slot: int, cohort: Cohort) -> None:
        for cls, runs in cohort.at_risk.items():
            self._learners[cls // NUM_CLASSES].survived(cls, slot, runs)

    def _count_hit(self, run: Run, blocks: int) -> None:
        slot, share = self._end_risk(run, blocks)
        learner = self._learners[run.cls // NUM_CLASSES]
        learner.hit(run.cls, slot, share, run.traits)

    def _settle_last_pin(self) -> None:
        """The last pin was no hit if none followed: what becomes of its blocks says
        nothing of their runs any more."""
        if self._last_pin is not None:
            runs = self._last_pin[1]
            for run in dict.fromkeys(runs):
                self._end_risk(run, runs.count(run))
            self._last_pin = None

    def _end_risk(self, run: Run, blocks: int) -> tuple[int, float]:
        """Returns the age of a run, as a slot, and the share of it that these blocks
        are and that was at risk until now."""
        share = min(max(0, blocks) / run.size, run.at_risk)
        run.at_risk -= share
        slot = hazard.slot_of(run.birth, self._epoch)
        self._cohorts[slot].at_risk[run.cls] -= share
        return slot, share

    def _learn(self) -> None:
        for learner in self._learners:
            learner.learn()
            if self._epoch >= hazard.LEARN_EVERY:
                learner.fade()
        self._rank()

    def _meet(self, group: int) -> Learner:
        """The learner of a group that is seen for the first time."""
        learner = Learner(len(self._learners) * NUM_CLASSES)
        self._learners.append(learner)
        self._learner_of[group] = learner
        self._rank()
        return learner

    def _rank(self) -> None:
        self._ranks = [ranks for learner in self._learners for ranks in learner.ranks]
        self._youngest = [
            next(rank for rank in ranks if not rank[1]) for ranks in self._ranks
        ]
        self._num_live += [0] * (len(self._ranks) - len(self._num_live))
        self._best += [_NOWHERE] * (len(self._ranks) - len(self._best))
        self._is_searched = False

    # -- runs ----------------------------------------------------------------------

    def _line(self, ids: Sequence[int]) -> Line | None:
        """What is known of the request that releases these blocks."""
        lines = self._lines
        found = [lines.pop(block) for block in ids if block in lines]
        return max(found, key=lambda line: line.hit, default=None)

    def _enter(
        self, ids: Sequence[int], cls: int, traits: int | None, line: Line, end: int
    ) -> Run:
        """A new run of evictable blocks."""
        n = len(ids)
        run = Run(
            self._epoch, cls, traits, line.turn, end, line.shared, [*ids[::-1]], n, n
        )
        run_of = self._run_of
        for block in ids:
            run_of[block] = run
        youngest = self._cohorts[0]
        runs = youngest.runs.get(cls)
        if runs is None:
            runs = youngest.runs[cls] = deque()
        runs.append(run)
        youngest.at_risk[cls] = youngest.at_risk.get(cls, 0.0) + 1.0
        if self._youngest[cls] < self._best[cls]:
            self._best[cls] = self._youngest[cls]
        self._length += n
        self._num_live[cls] += 1
        self._num_queued += 1
        return run

    def _remember(self, run: Run, ids: Sequence[int]) -> None:
        """Keys by which the run is known when its blocks are computed again."""
        start = bisect_left(_DEPTHS, run.end - len(ids))
        depths = _DEPTHS[start : bisect_left(_DEPTHS, run.end)]
        sampled = depths[-_KEYS_PER_RUN:]
        if len(depths) > 2 * _KEYS_PER_RUN:
            sampled.append(depths[len(depths) // 2])
        info, known = self._info, self._known
        for depth in sampled:
            key = info(ids[run.end - 1 - depth]).key
            known[key] = run
            known.move_to_end(key)
        while len(known) > self._max_known:
            known.popitem(last=False)

    def _leave(self, ids: Sequence[int], runs: Sequence[Run]) -> None:
        """Blocks leave the evictable set other than as victims.

        Args:
            ids: the blocks.
            runs: their runs.
        """
        run_of = self._run_of
        for block in ids:
            run_of[block] = None
        self._length -= len(ids)
        for run in dict.fromkeys(runs):
            run.live -= runs.count(run)
            self._num_live[run.cls] -= not run.live
            # Halved at least, so that entries of blocks that left stay few.
            if 2 * run.live < len(run.blocks):
                run.blocks = [b for b in run.blocks if run_of[b] is run]

    def _drop_empty_runs(self) -> None:
        """Linear in the runs, and due only after as many releases: amortised O(1)."""
        for cohort in self._cohorts:
            for cls, runs in cohort.runs.items():
                cohort.runs[cls] = deque(run for run in runs if run.live)
        self._num_queued = sum(self._num_live)

    # -- integrity -----------------------------------------------------------------

    def check(self) -> None:
        queued = [
            run
            for cohort in self._cohorts
            for runs in cohort.runs.values()
            for run in runs
        ]
        evictable = [run for run in self._run_of if run is not None]
        if not len(evictable) == self._length == len(list(self.order())):
            raise IntegrityError("reuse: runs, order and length disagree")
        if len(queued) != self._num_queued:
            raise IntegrityError("reuse: queued runs are miscounted")
        live = [run.cls for run in queued if run.live]
        if [live.count(cls) for cls in range(len(self._ranks))] != self._num_live:
            raise IntegrityError("reuse: runs with blocks are miscounted")
        if sum(run.live for run in queued) != self._length:
            raise IntegrityError("reuse: blocks of runs are miscounted")
        if len(self._known) > self._max_known:
            raise IntegrityError("reuse: more keys are remembered than allowed")
