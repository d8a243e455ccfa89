"""One run, played from failure to failure; what follows each is the supervisor's policy's choice.

Failures of nodes are a Poisson process with a constant rate. Belongs here: the course of one run.
Does not belong here: sums over runs (`trials`), the arithmetic of a stretch (`training`).
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cache

from hpctrain.simulate.failures import Kind
from hpctrain.simulate.memory import Memory
from hpctrain.simulate.scenario import Scenario
from hpctrain.simulate.training import Cycle, Stretch
from hpctrain.supervise.judge.causes import Cause
from hpctrain.supervise.judge.documents import Action, ActionKind, Situation, Verdict
from hpctrain.supervise.judge.policy import decide
from hpctrain.telemetry.segments import Category

# A run that takes so many times its work is not going to end.
_HOPELESS_FACTOR = 50.0
_HOPELESS_SECONDS = 30 * 86400.0
NO_END = "the run makes no progress"


@dataclass(frozen=True)
class Played:
    """One run: seconds by category and lost by cause, what happened, why it stopped (if so)."""

    seconds: dict[Category, float]
    lost_seconds: dict[Cause, float]
    failures: dict[str, int]
    requeues: int
    stopped: str | None

    @property
    def wall_seconds(self) -> float:
        return math.fsum(self.seconds.values())

    @property
    def occupied_seconds(self) -> float:
        """With nodes: all but the queue."""
        return self.wall_seconds - self.seconds.get(Category.QUEUEING, 0.0)


@dataclass(frozen=True)
class _End:
    """What ended a launch. `bad`: its node is of no use, though it may still answer."""

    cause: Cause
    node_gone: bool = False
    bad: bool = False
    requeued: bool = False
    keeps_nodes: bool = True
    kind: Kind | None = None


@cache
def _verdict(cause: Cause, requeued: bool, hard: bool) -> Verdict:
    return Verdict(cause, str(cause).replace("_", " "), already_requeued=requeued, hard=hard)


class Trial:
    """Plays one run; every random number comes from `dice`."""

    def __init__(self, scenario: Scenario, dice: random.Random) -> None:
        self.scenario, self.dice = scenario, dice
        self.cycle = Cycle(
            scenario.work_between_saves,
            scenario.stall,
            scenario.save_write_seconds,
            scenario.last_save,
        )
        self.memory = Memory(scenario.supervise.storm_window_seconds)
        self.spent: defaultdict[Category, float] = defaultdict(float)
        self.lost: defaultdict[Cause, float] = defaultdict(float)
        self.failures: Counter[str] = Counter()
        self.repairs: list[float] = []
        self.now = self.saved = 0.0
        self.requeues = 0
        self.blame: Cause | None = None
        self.healthy = 0
        self.bad: Kind | None = None
        self.limit_at = self.preempted_at = math.inf
        self.kinds = scenario.failure_mix.kinds
        self.weights = [kind.weight for kind in self.kinds]

    def play(self) -> Played:
        """From the first submission to the end of training, or to where the policy gives up."""
        self._pass(Category.QUEUEING, self.scenario.first_wait_seconds)
        self._allocate()
        stopped: str | None = None
        while stopped is None:
            end = self._launch()
            if end is None:
                break
            stopped = self._go_on(end) or self._hopeless()
        return Played(
            seconds=dict(self.spent),
            lost_seconds=dict(self.lost),
            failures=dict(self.failures),
            requeues=self.requeues,
            stopped=stopped,
        )

    def _pass(self, category: Category, seconds: float) -> None:
        """Time goes by; what the last interruption costs is put to its account."""
        self.spent[category] += seconds
        self.now += seconds
        if self.blame is not None:
            self.lost[self.blame] += seconds

    def _hopeless(self) -> str | None:
        limit = _HOPELESS_FACTOR * self.scenario.work_seconds + _HOPELESS_SECONDS
        return NO_END if self.now > limit else None

    # -- a launch --------------------------------------------------------------------------------

    def _launch(self) -> _End | None:
        """One launch up to its end; None: the run is done."""
        scenario, began = self.scenario, self.now
        resumed = self.saved
        fails_at = began + self._next(scenario.nodes * scenario.failures_per_second)
        if self.bad is not None:
            fails_at = min(fails_at, began + scenario.restart_seconds)
        soft_limit = self.limit_at - scenario.last_save
        left = scenario.work_seconds - self.saved
        ready = began + scenario.restart_seconds
        done_at = ready + self.cycle.to_the_end(left)
        ends_at = min(fails_at, self.preempted_at, soft_limit)
        self._pass(Category.STARTING, min(ready, max(ends_at, began)) - began)
        self.blame = None
        if done_at <= ends_at:
            self._train(self.cycle.finished(left), None)
            return None
        end = self._what_ended(fails_at, soft_limit)
        graceful = end.cause is Cause.TIME_LIMIT or (
            end.cause is Cause.PREEMPTED and scenario.warned
        )
        stretch = self.cycle.cut_off(max(0.0, ends_at - ready), left)
        self._train(stretch, end.cause, graceful=graceful and ends_at > ready)
        self._lose_spares(self.now - began)
        self._detect(end)
        self.memory.ended(end.cause, self.now, self.saved, resumed)
        return end

    def _train(self, stretch: Stretch, cause: Cause | None, *, graceful: bool = False) -> None:
        """`graceful`: a last save makes everything durable."""
        kept = stretch.done if graceful else stretch.kept
        self._pass(Category.PRODUCTIVE, kept)
        self._pass(Category.SAVING, stretch.stalled + (self.scenario.last_save if graceful else 0))
        self.saved += kept
        self.blame = cause
        self._pass(Category.REDONE, stretch.done - kept)

    def _next(self, rate: float) -> float:
        return self.dice.expovariate(rate) if rate else math.inf

    def _what_ended(self, fails_at: float, soft_limit: float) -> _End:
        if soft_limit <= min(fails_at, self.preempted_at):
            return _End(Cause.TIME_LIMIT, keeps_nodes=False)
        if self.preempted_at <= fails_at:
            return _End(Cause.PREEMPTED, keeps_nodes=False)
        # A broken node that is still in use fails in the way in which it did before.
        kind = self.bad or self.dice.choices(self.kinds, self.weights)[0]
        self.failures[kind.name] += 1
        return self._failure(kind)

    def _failure(self, kind: Kind) -> _End:
        """The node of the supervisor itself takes the job with it, and Slurm requeues that."""
        gone = kind.takes_node and kind.cause is Cause.NODE_FAILURE
        if gone and self.dice.random() * self.scenario.nodes < 1:
            return _End(Cause.NODE_FAILURE, True, requeued=True, keeps_nodes=False)
        return _End(kind.cause, node_gone=gone, bad=kind.takes_node and not gone, kind=kind)

    def _lose_spares(self, seconds: float) -> None:
        """Nodes that wait fail like others; nobody notices until they are needed."""
        rate = self.scenario.failures_per_second * self.scenario.failure_mix.share_taking_nodes
        survives = math.exp(-rate * seconds)
        for _ in range(self.healthy - self.scenario.nodes):
            if self.dice.random() > survives:
                self._lose_node()

    def _lose_node(self) -> None:
        self.healthy -= 1
        heapq.heappush(self.repairs, self.now + self.scenario.repair_seconds)

    def _detect(self, end: _End) -> None:
        """Until the verdict: what says nothing takes the stall limit, a dead node Slurm's time."""
        if end.cause in (Cause.TIME_LIMIT, Cause.PREEMPTED):
            return
        if end.node_gone:
            category = Category.DOWN if end.requeued else Category.DETECTING
            self._pass(category, self.scenario.lost_node_seconds)
            return
        silent = end.cause in (Cause.HANG, Cause.FABRIC)
        seconds = self.scenario.stall_seconds if silent else self.scenario.detect_seconds
        self._pass(Category.DETECTING, seconds)

    # -- what follows ----------------------------------------------------------------------------

    def _go_on(self, end: _End) -> str | None:
        """Do what the policy decides; returns its reason if that is to stop."""
        if end.node_gone:
            self._lose_node()
        found = end.bad and self.dice.random() < self.scenario.bad_nodes_found
        if found:
            self._lose_node()
        action = self._decide(end, excludes=end.bad and not found)
        if action.kind in (ActionKind.STOP, ActionKind.HOLD):
            return action.reason
        if action.exclude:
            self._lose_node()
        elif end.bad and not found:
            self.bad = end.kind
        if action.kind is ActionKind.RELAUNCH:
            self._pass(Category.RESTARTING, self.scenario.relaunch_seconds + action.delay_seconds)
            return None
        self._queue(end)
        return None

    def _decide(self, end: _End, *, excludes: bool) -> Action:
        scenario = self.scenario
        situation = Situation(
            keeps_nodes=end.keeps_nodes,
            allocated_nodes=scenario.nodes + scenario.spare_nodes,
            healthy_nodes=self.healthy,
            needed_nodes=scenario.nodes,
            least_nodes=scenario.nodes,
            exclude=("a broken node",) if excludes else (),
        )
        verdict = _verdict(end.cause, end.requeued, end.bad)
        return decide(verdict, self.memory.history(), situation, scenario.supervise)

    def _queue(self, end: _End) -> None:
        """Back into the queue, then a new allocation; a full cluster waits for repairs."""
        scenario = self.scenario
        self.requeues += 1
        wait = scenario.requeue_delay_seconds
        if scenario.queue_wait_seconds:
            wait += self.dice.expovariate(1 / scenario.queue_wait_seconds)
        if end.cause is Cause.PREEMPTED and scenario.preemption_wait_seconds:
            wait += self.dice.expovariate(1 / scenario.preemption_wait_seconds)
        self._pass(Category.QUEUEING, max(wait, self._repaired_at() - self.now))
        self._allocate()

    def _repaired_at(self) -> float:
        """When the cluster has as many good nodes as the job asks for."""
        if self.scenario.cluster_nodes is None:
            return self.now
        surplus = self.scenario.cluster_nodes - self.scenario.nodes - self.scenario.spare_nodes
        missing = len(self.repairs) - surplus
        return sorted(self.repairs)[missing - 1] if missing > 0 else self.now

    def _allocate(self) -> None:
        scenario = self.scenario
        while self.repairs and self.repairs[0] <= self.now:
            heapq.heappop(self.repairs)
        self.healthy, self.bad = scenario.nodes + scenario.spare_nodes, None
        self.limit_at = self.now + scenario.walltime_seconds
        self.preempted_at = self.now + self._next(scenario.preemptions_per_day / 86400)
