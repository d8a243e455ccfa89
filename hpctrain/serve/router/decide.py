"""Which replicas are started and drained next. Pure.

A replica has a number and lives in generations, one Slurm job after the other. A generation that is
to go is drained only when the next one is in the router's rotation, so a number has two jobs for a
while: at the end of a walltime, and in a rolling restart. Belongs here: that choice, and its order.
Does not belong here: how many replicas there should be (`scaling`), looking and acting
(`controller`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from hpctrain.records.service_layout import ReplicaName

Phase = Literal["queued", "loading", "ready", "draining", "ended", "failed"]
_COMING: tuple[Phase, ...] = ("queued", "loading")
_LIVE: tuple[Phase, ...] = (*_COMING, "ready")
# A successor is submitted so early that loading may take half as long again as it did.
LOAD_MARGIN = 1.5
# No generation spends more than this share of its time beside its successor.
MOST_OVERLAP_SHARE = 0.5
# Replicas that fail for good are started anew so often within the window, and no faster than this.
FAILURE_WINDOW_SECONDS = 3600.0
MOST_FAILURES = 6
FIRST_DELAY_SECONDS, LONGEST_DELAY_SECONDS = 15.0, 600.0


@dataclass(frozen=True)
class ReplicaView:
    """One job of one replica as it is seen now; times in seconds since the epoch.

    `in_rotation`: the router asks it. `load`: requests that it computes or holds back.
    `drain_asked`: it was asked to leave. `since`: when it entered its phase.
    """

    name: ReplicaName
    phase: Phase
    submitted_at: float
    since: float
    in_rotation: bool = False
    load: float = 0.0
    drain_asked: bool = False
    walltime_ends: float | None = None
    problem: str = ""

    @property
    def is_live(self) -> bool:
        """Whether it answers, or will, and nobody has asked it to leave."""
        return self.phase in _LIVE and not self.drain_asked

    @property
    def answers(self) -> bool:
        return self.is_live and self.phase == "ready" and self.in_rotation


@dataclass(frozen=True)
class RollingRestart:
    """A restart that a person wants of all generations submitted before `asked_at`.

    `differences`: of new generations that were compared with the old ones, what differed in their
    answers; empty text: nothing.
    """

    asked_at: float
    differences: Mapping[ReplicaName, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Timing:
    """How long things take, in seconds, and how many jobs of replicas there may be at once."""

    load_seconds: float
    queue_seconds: float
    drain_seconds: float
    most_jobs: int | None = None

    @property
    def lead_seconds(self) -> float:
        """From the submission of a replica to its first answer, with a margin."""
        return LOAD_MARGIN * self.load_seconds + self.queue_seconds


@dataclass(frozen=True)
class Start:
    """Submit a generation; `instead_of` is the one that answers until this one does."""

    name: ReplicaName
    reason: str
    instead_of: ReplicaName | None = None


@dataclass(frozen=True)
class Drain:
    """Ask a generation to leave."""

    name: ReplicaName
    reason: str


@dataclass(frozen=True)
class StopRestart:
    """End the rolling restart: the first new generation was no good."""

    reason: str


@dataclass(frozen=True)
class FinishRestart:
    """The rolling restart has replaced every generation that it was asked to."""


Action = Start | Drain | StopRestart | FinishRestart


@dataclass(frozen=True)
class Decision:
    """What is done now, and what is not done yet and why."""

    actions: tuple[Action, ...] = ()
    waits: tuple[str, ...] = ()


def decide(
    replicas: Sequence[ReplicaView],
    wanted: int,
    timing: Timing,
    *,
    now: float,
    restart: RollingRestart | None = None,
) -> Decision:
    """Choose what brings the replicas nearer to `wanted`, without taking away what answers."""
    return _Choice(replicas, wanted, timing, now, restart).made()


class _Choice:
    """One decision while it is made: what is kept, and what was chosen so far."""

    def __init__(
        self,
        replicas: Sequence[ReplicaView],
        wanted: int,
        timing: Timing,
        now: float,
        restart: RollingRestart | None,
    ) -> None:
        self._wanted, self._timing, self._now, self._restart = wanted, timing, now, restart
        self._replicas = tuple(replicas)
        self._newest: dict[int, int] = defaultdict(int)
        for view in self._replicas:
            number = view.name.number
            self._newest[number] = max(self._newest[number], view.name.generation)
        self._kept: dict[int, list[ReplicaView]] = defaultdict(list)
        for view in sorted(self._replicas, key=lambda view: view.name):
            if view.is_live:
                self._kept[view.name.number].append(view)
        gone = ("ended", "failed")
        self._jobs = sum(view.phase not in gone for view in self._replicas)
        self._actions: list[Action] = []
        self._waits: list[str] = []

    def made(self) -> Decision:
        self._replace()
        self._shrink()
        self._grow()
        self._succeed()
        self._restart_next()
        return Decision(tuple(self._actions), tuple(self._waits))

    # -- generations that another one replaces ---------------------------------------------

    def _replace(self) -> None:
        """Drain each generation whose successor answers, and surplus ones that never did."""
        for views in self._kept.values():
            newest = views[-1]
            for view in views[:-1]:
                if self._has_replaced(newest, view):
                    self._drain(view, f"{newest.name} answers in its place")
                elif view.phase in _COMING and view.phase == newest.phase == "queued":
                    self._drain(view, f"{newest.name} waits in its place")

    def _has_replaced(self, newest: ReplicaView, view: ReplicaView) -> bool:
        if not newest.answers:
            return False
        if not self._is_restarted(view):
            return True
        assert self._restart is not None, "restarted by a restart"
        difference = self._restart.differences.get(newest.name)
        if difference is None:
            self._waits.append(f"{newest.name} is compared with {view.name}")
            return view.phase != "ready"
        if difference:
            self._drain(newest, f"answers otherwise than {view.name}: {difference}")
            self._stop_restart(f"{newest.name} answers otherwise than {view.name}: {difference}")
        return not difference

    # -- the number of replicas ------------------------------------------------------------

    def _shrink(self) -> None:
        """Give surplus numbers up: those that do not answer yet first, then the least loaded."""
        surplus = len(self._kept) - self._wanted
        for number in sorted(self._kept, key=self._order_of_leaving)[: max(surplus, 0)]:
            for view in self._kept.pop(number):
                self._drain(view, f"{self._wanted} wanted")

    def _order_of_leaving(self, number: int) -> tuple[int, float, float, int]:
        views = self._kept[number]
        rank = max(3 if view.answers else _LIVE.index(view.phase) for view in views)
        ends = min(view.walltime_ends or float("inf") for view in views)
        return rank, sum(view.load for view in views), ends, -number

    def _grow(self) -> None:
        """Start what is missing, below the budget of failures and of jobs."""
        missing = self._wanted - len(self._kept)
        if missing <= 0 or not self._may_start_again():
            return
        number = 0
        while missing > 0 and self._has_room():
            number += 1
            if number not in self._kept:
                name = ReplicaName(number, self._newest[number] + 1)
                self._start(name, f"{self._wanted} wanted")
                missing -= 1

    def _may_start_again(self) -> bool:
        """Whether the failures of the last hour allow another start, and when if not yet."""
        begin = self._now - FAILURE_WINDOW_SECONDS
        failed = [
            view
            for view in self._replicas
            if view.phase == "failed" and not view.drain_asked and view.since > begin
        ]
        if not failed:
            return True
        last = max(failed, key=lambda view: view.since)
        if len(failed) >= MOST_FAILURES:
            self._waits.append(
                f"no replica is started: {len(failed)} have failed within an hour, "
                f"{last.name} with: {last.problem or 'unknown'}"
            )
            return False
        delay_seconds = min(FIRST_DELAY_SECONDS * 2.0 ** (len(failed) - 1), LONGEST_DELAY_SECONDS)
        left = last.since + delay_seconds - self._now
        if left > 0:
            self._waits.append(f"{left:.0f} s until the next start: {last.name} has failed")
        return left <= 0

    # -- successors ------------------------------------------------------------------------

    def _succeed(self) -> None:
        """Start the next generation of each one whose walltime comes near."""
        for number, views in sorted(self._kept.items()):
            view = views[-1]
            if len(views) > 1 or view.walltime_ends is None or view.phase == "queued":
                continue
            lead = self._timing.lead_seconds + self._timing.drain_seconds
            lead = min(lead, MOST_OVERLAP_SHARE * (view.walltime_ends - view.submitted_at))
            if self._now >= view.walltime_ends - lead and self._has_room():
                left = view.walltime_ends - self._now
                self._start_next(number, view, f"{left:.0f} s are left to {view.name}")

    def _restart_next(self) -> None:
        """Start the next generation of one replica that a person wants restarted."""
        restart = self._restart
        if restart is None or any(isinstance(one, StopRestart) for one in self._actions):
            return
        since = [view for view in self._replicas if view.submitted_at >= restart.asked_at]
        for view in since:
            if view.phase == "failed":
                self._stop_restart(f"{view.name} has failed: {view.problem or 'unknown'}")
                return
        old = {n: views[-1] for n, views in self._kept.items() if self._is_restarted(views[-1])}
        under_way = [views for views in self._kept.values() if len(views) > 1]
        coming = [view for views in self._kept.values() for view in views if view.phase in _COMING]
        if not old and not under_way:
            self._actions.append(FinishRestart())
        elif not under_way and not any(isinstance(one, Start) for one in self._actions):
            if any(view in since for view in coming):
                self._waits.append("the restart waits for replicas that load")
            elif old and self._has_room():
                number, view = min(old.items())
                self._start_next(number, view, f"rolling restart of {view.name}")

    def _is_restarted(self, view: ReplicaView) -> bool:
        return self._restart is not None and view.submitted_at < self._restart.asked_at

    # -- what was chosen -------------------------------------------------------------------

    def _has_room(self) -> bool:
        most = self._timing.most_jobs
        if most is None or self._jobs < most:
            return True
        words = f"{self._jobs} jobs are all that `resources.max_gpus` allows"
        if words not in self._waits:
            self._waits.append(words)
        return False

    def _start(self, name: ReplicaName, reason: str, instead_of: ReplicaName | None = None) -> None:
        self._newest[name.number] = name.generation
        self._jobs += 1
        self._actions.append(Start(name, reason, instead_of))

    def _start_next(self, number: int, view: ReplicaView, reason: str) -> None:
        self._start(ReplicaName(number, self._newest[number] + 1), reason, view.name)

    def _drain(self, view: ReplicaView, reason: str) -> None:
        if not any(isinstance(one, Drain) and one.name == view.name for one in self._actions):
            self._actions.append(Drain(view.name, reason))

    def _stop_restart(self, reason: str) -> None:
        if not any(isinstance(one, StopRestart) for one in self._actions):
            self._actions.append(StopRestart(reason))
