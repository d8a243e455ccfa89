"""Simulate one run from failure to failure; the supervisor's policy decides after each.

Failures of nodes are a Poisson process with a constant rate. Belongs here: the course of one run
and the arithmetic of a stretch. Does not belong here: statistics over runs (see `monte_carlo`).
"""

from __future__ import annotations

import functools
import heapq
import math
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from hpctrain.judge.causes import FAILURE_CAUSES, Cause
from hpctrain.judge.documents import Action, ActionKind, History, Situation, Verdict
from hpctrain.judge.policy import decide
from hpctrain.simulate.scenario import FailureKind, Scenario
from hpctrain.telemetry.timeline import Category

# A run that takes this many times its work is taken as endless.
_HOPELESS_FACTOR = 50.0
_HOPELESS_SECONDS = 30 * 86400.0
NO_END = "the run makes no progress"


@dataclass
class RunOutcome:
    """Result of one run: seconds by category, losses by cause, counts, why it stopped (or None).

    `repair_seconds` of the queueing are spent because too few nodes of the cluster work.
    """

    seconds: defaultdict[Category, float] = field(default_factory=lambda: defaultdict(float))
    lost_seconds: defaultdict[Cause, float] = field(default_factory=lambda: defaultdict(float))
    failures: Counter[str] = field(default_factory=Counter)
    requeues: int = 0
    launches: int = 0
    preemptions: int = 0
    repair_seconds: float = 0.0
    stopped: str | None = None

    @property
    def wall_seconds(self) -> float:
        return math.fsum(self.seconds.values())

    @property
    def occupied_seconds(self) -> float:
        """Seconds with nodes allocated: all but the queue."""
        return self.wall_seconds - self.seconds.get(Category.QUEUEING, 0.0)


@dataclass(frozen=True)
class _LaunchEnd:
    """Why a launch ended. `bad`: its node is unusable, although it may still respond."""

    cause: Cause
    node_gone: bool = False
    bad: bool = False
    requeued: bool = False
    keeps_nodes: bool = True
    kind: FailureKind | None = None


Decisions = Callable[[_LaunchEnd, bool, int, History], Action]


def decisions_about(scenario: Scenario) -> Decisions:
    """Return the policy as a function of an end, whether its node is to be excluded, healthy nodes.

    Runs of one scenario are alike, so each decision is made once.
    """

    @functools.cache
    def about(end: _LaunchEnd, excludes: bool, healthy: int, history: History) -> Action:
        situation = Situation(
            keeps_nodes=end.keeps_nodes,
            allocated_nodes=scenario.nodes + scenario.spare_nodes,
            healthy_nodes=healthy,
            needed_nodes=scenario.nodes,
            least_nodes=scenario.nodes,
            exclude=("a broken node",) if excludes else (),
        )
        words = str(end.cause).replace("_", " ")
        verdict = Verdict(end.cause, words, already_requeued=end.requeued, hard=end.bad)
        return decide(verdict, history, situation, scenario.supervise)

    return about


class SimulatedRun:
    """The state of one simulated run; every random number comes from `rng`.

    `decisions` may be shared by all runs of `scenario`.
    """

    def __init__(
        self, scenario: Scenario, rng: random.Random, decisions: Decisions | None = None
    ) -> None:
        self.scenario, self.rng = scenario, rng
        self.decide = decisions or decisions_about(scenario)
        self.cycle = Cycle(
            scenario.work_between_saves,
            scenario.stall,
            scenario.save_write_seconds,
            scenario.last_save,
        )
        self.history_counter = HistoryCounter(scenario.supervise.storm_window_seconds)
        self.outcome = RunOutcome()
        self.repairs: list[float] = []
        self.now = self.saved = 0.0
        self.blame: Cause | None = None
        self.healthy = 0
        self.bad: FailureKind | None = None
        self.limit_at = self.preempted_at = math.inf
        self.kinds = scenario.failure_mix.kinds
        self.weights = [kind.weight for kind in self.kinds]

    def run(self) -> RunOutcome:
        """Simulate from the first submission to the end of training, or until the policy stops."""
        self._spend(Category.QUEUEING, self.scenario.first_wait_seconds)
        self._allocate()
        limit = _HOPELESS_FACTOR * self.scenario.work_seconds + _HOPELESS_SECONDS
        outcome = self.outcome
        while outcome.stopped is None:
            end = self._launch()
            if end is None:
                break
            outcome.stopped = self._follow_policy(end)
            if outcome.stopped is None and self.now > limit:
                outcome.stopped = NO_END
        return outcome

    def _spend(self, category: Category, seconds: float) -> None:
        """Advance the clock; attribute the time to the last interruption until it is over."""
        self.outcome.seconds[category] += seconds
        self.now += seconds
        if self.blame is not None:
            self.outcome.lost_seconds[self.blame] += seconds

    # -- a launch --------------------------------------------------------------------------------

    def _launch(self) -> _LaunchEnd | None:
        """Simulate one launch and return its end; None when the run is complete."""
        scenario, began = self.scenario, self.now
        resumed = self.saved
        self.outcome.launches += 1
        fails_at = began + self._next(scenario.nodes * scenario.failures_per_second)
        if self.bad is not None:
            fails_at = min(fails_at, began + scenario.restart_seconds)
        soft_limit = self.limit_at - scenario.last_save
        left = scenario.work_seconds - self.saved
        ready = began + scenario.restart_seconds
        done_at = ready + self.cycle.to_the_end(left)
        ends_at = min(fails_at, self.preempted_at, soft_limit)
        self._spend(Category.STARTING, min(ready, max(ends_at, began)) - began)
        self.blame = None
        if done_at <= ends_at:
            self._train(self.cycle.finished(left), None)
            return None
        end = self._draw_end(fails_at, soft_limit)
        graceful = (end.cause is Cause.TIME_LIMIT and scenario.saves_at_limit) or (
            end.cause is Cause.PREEMPTED and scenario.warned
        )
        stretch = self.cycle.cut_off(max(0.0, ends_at - ready), left)
        self._train(stretch, end.cause, graceful=graceful and ends_at > ready)
        self._lose_spares(self.now - began)
        if end.cause not in (Cause.TIME_LIMIT, Cause.PREEMPTED):
            self._detect(end)
        self.history_counter.ended(end.cause, self.now, self.saved, resumed)
        return end

    def _train(self, stretch: Stretch, cause: Cause | None, *, graceful: bool = False) -> None:
        """Account for a stretch; `graceful`: a last save makes all of its work durable."""
        kept = stretch.done if graceful else stretch.kept
        self._spend(Category.PRODUCTIVE, kept)
        self._spend(Category.SAVING, stretch.stalled + (self.scenario.last_save if graceful else 0))
        self.saved += kept
        self.blame = cause
        self._spend(Category.REDONE, stretch.done - kept)

    def _next(self, rate: float) -> float:
        return self.rng.expovariate(rate) if rate else math.inf

    def _draw_end(self, fails_at: float, soft_limit: float) -> _LaunchEnd:
        if soft_limit <= min(fails_at, self.preempted_at):
            return _LaunchEnd(Cause.TIME_LIMIT, keeps_nodes=False)
        if self.preempted_at <= fails_at:
            self.outcome.preemptions += 1
            return _LaunchEnd(Cause.PREEMPTED, keeps_nodes=False)
        # A broken node that is still in use fails as it did before.
        kind = self.bad or self.rng.choices(self.kinds, self.weights)[0]
        self.outcome.failures[kind.name] += 1
        gone = kind.takes_node and kind.cause is Cause.NODE_FAILURE
        if gone and self.rng.random() * self.scenario.nodes < 1:
            # The loss of the supervisor's own node ends the job, and Slurm requeues it.
            return _LaunchEnd(Cause.NODE_FAILURE, True, requeued=True, keeps_nodes=False)
        return _LaunchEnd(kind.cause, node_gone=gone, bad=kind.takes_node and not gone, kind=kind)

    def _lose_spares(self, seconds: float) -> None:
        """Let idle spare nodes fail like others, which remains unnoticed until they are needed."""
        if self.healthy == self.scenario.nodes:
            return
        rate = self.scenario.failures_per_second * self.scenario.failure_mix.share_taking_nodes
        survives = math.exp(-rate * seconds)
        for _ in range(self.healthy - self.scenario.nodes):
            if self.rng.random() > survives:
                self._lose_node()

    def _lose_node(self) -> None:
        self.healthy -= 1
        heapq.heappush(self.repairs, self.now + self.scenario.repair_seconds)

    def _detect(self, end: _LaunchEnd) -> None:
        """Spend the time until the verdict: the stall limit, Slurm's timeout, or a short delay."""
        if end.node_gone:
            category = Category.DOWN if end.requeued else Category.DETECTING
            self._spend(category, self.scenario.lost_node_seconds)
            return
        silent = end.cause in (Cause.HANG, Cause.FABRIC)
        seconds = self.scenario.stall_seconds if silent else self.scenario.detect_seconds
        self._spend(Category.DETECTING, seconds)

    # -- after a launch --------------------------------------------------------------------------

    def _follow_policy(self, end: _LaunchEnd) -> str | None:
        """Perform the policy's action; returns its reason if the action is to stop."""
        if end.node_gone:
            self._lose_node()
        detected = end.bad and self.rng.random() < self.scenario.bad_nodes_found
        if detected:
            self._lose_node()
        excludes = end.bad and not detected
        history = self.history_counter.history()
        action = self.decide(end, excludes, self.healthy, history)
        if action.kind in (ActionKind.STOP, ActionKind.HOLD):
            return action.reason
        if action.exclude:
            self._lose_node()
        elif excludes:
            self.bad = end.kind
        if action.kind is ActionKind.RELAUNCH:
            self._spend(Category.RESTARTING, self.scenario.relaunch_seconds + action.delay_seconds)
            return None
        self._requeue(end)
        return None

    def _requeue(self, end: _LaunchEnd) -> None:
        """Wait in the queue for a new allocation; a full cluster also waits for repairs."""
        scenario = self.scenario
        self.outcome.requeues += 1
        wait = scenario.requeue_delay_seconds
        if scenario.queue_wait_seconds:
            wait += self.rng.expovariate(1 / scenario.queue_wait_seconds)
        if end.cause is Cause.PREEMPTED and scenario.preemption_wait_seconds:
            wait += self.rng.expovariate(1 / scenario.preemption_wait_seconds)
        enough_nodes_at = self.now
        if scenario.cluster_nodes is not None:
            surplus = scenario.cluster_nodes - scenario.nodes - scenario.spare_nodes
            missing = len(self.repairs) - surplus
            enough_nodes_at = sorted(self.repairs)[missing - 1] if missing > 0 else self.now
        repair = max(0.0, enough_nodes_at - self.now - wait)
        self.outcome.repair_seconds += repair
        self._spend(Category.QUEUEING, wait + repair)
        self._allocate()

    def _allocate(self) -> None:
        scenario = self.scenario
        while self.repairs and self.repairs[0] <= self.now:
            heapq.heappop(self.repairs)
        self.healthy, self.bad = scenario.nodes + scenario.spare_nodes, None
        self.limit_at = self.now + scenario.walltime_seconds
        self.preempted_at = self.now + self._next(scenario.preemptions_per_day / 86400)


# -- Maintain the policy's `History` of a simulated run, launch by launch -----------------------
# The counts equal those of `hpctrain.judge.launch_history.history`, which computes them from a list
# of events; a test compares the two.


class HistoryCounter:
    """Counts ends of launches since the last one that brought a new checkpoint."""

    def __init__(self, window_seconds: float) -> None:
        self._window_seconds = window_seconds
        self._best = 0.0
        self._by_cause: Counter[str] = Counter()
        self._recent: deque[float] = deque()
        self._ever = False

    def ended(self, cause: Cause, now: float, checkpoint: float, resumed_at: float) -> None:
        """Count the end of a launch that began at `resumed_at` seconds of work.

        `checkpoint` is the work in the newest checkpoint, `now` the wall-clock time, in seconds.
        """
        if checkpoint > self._best:
            self._best, self._ever = checkpoint, True
            self._by_cause.clear()
        if checkpoint <= resumed_at:
            self._by_cause[cause] += 1
        if cause in FAILURE_CAUSES:
            self._recent.append(now)
        while self._recent and self._recent[0] < now - self._window_seconds:
            self._recent.popleft()

    def history(self) -> History:
        """Return the policy's input. Simulated failures have no fingerprints and no steps."""
        if not self._by_cause:
            return History(0, 0, (), recent_failures=len(self._recent), ever_progressed=self._ever)
        return History(
            failures_without_progress=sum(
                count for cause, count in self._by_cause.items() if cause in FAILURE_CAUSES
            ),
            time_limits_without_progress=self._by_cause[Cause.TIME_LIMIT],
            by_cause=tuple(sorted(self._by_cause.items())),
            recent_failures=len(self._recent),
            ever_progressed=self._ever,
        )


# ----------------------------------------------------------------------------------------------
# Compute the work done and kept in one uninterrupted stretch of training, in closed form. Pure.
# A stretch is a number of whole cycles of work and stall, and a remainder.


_ROUNDING_SECONDS = 1e-6


@dataclass(frozen=True)
class Stretch:
    """Seconds: `done` of work, of which `kept` are durable, `stalled` for saves."""

    done: float
    kept: float
    stalled: float


@dataclass(frozen=True)
class Cycle:
    """`work` seconds, then `stall` without training; durable `delay` after the stall.

    `last` is the duration of a foreground save, at the end of the run or of an attempt.
    """

    work: float
    stall: float
    delay: float
    last: float

    def to_the_end(self, left: float) -> float:
        """Return the seconds until `left` seconds of work are done and durable."""
        return left + self._saves_before_the_end(left) * self.stall + self.last

    def finished(self, left: float) -> Stretch:
        return Stretch(left, left, self.to_the_end(left) - left)

    def cut_off(self, seconds: float, left: float) -> Stretch:
        """Return the stretch after `seconds`, before `left` is done; unsaved work is lost."""
        period = self.work + self.stall
        saves = self._saves_before_the_end(left)
        whole = min(math.floor(seconds / period), saves)
        done = min(whole * self.work + min(seconds - whole * period, self.work), left)
        durable = min(max(0, math.floor((seconds - self.delay) / period)), saves)
        return Stretch(done, durable * self.work, seconds - done)

    def _saves_before_the_end(self, left: float) -> int:
        return max(0, math.ceil(left / self.work - _ROUNDING_SECONDS) - 1)
