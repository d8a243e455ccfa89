"""Collects what `hpctrain top` shows: all runs with one squeue, and more about the chosen one.

A look reads little: runs that are over are not read again until their ledger changes, and the
metrics of the chosen run are read on from where the last look has ended. Where Slurm does not
answer, its last answer stays valid and its age is known. Belongs here: looks that follow each
other, and what deserves attention. Does not belong here: the state of a run (`status`), rules about
problems (`watch_rules`), text and keys.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from hpctrain.base import clock
from hpctrain.base.formats import NewerFormatError
from hpctrain.base.units import short_duration
from hpctrain.records.find import RunFiles, all_runs
from hpctrain.records.jobs import generation
from hpctrain.records.layout import RunLayout
from hpctrain.records.manifest import MANIFEST_NAME, checkpoint_name
from hpctrain.records.run_jobs import RunJobs
from hpctrain.records.run_records import StepMetrics, parse_record
from hpctrain.runs.notify import NoticeState, notice_states
from hpctrain.runs.run_documents import known_plan
from hpctrain.runs.run_page import CurvePoint, curve_of
from hpctrain.runs.state import RunState
from hpctrain.runs.status import ObservedRun, RunStatus, observe, poll_interval
from hpctrain.runs.watch import snapshot
from hpctrain.runs.watch_rules import Symptom, WatchRemedy, find_problems
from hpctrain.slurm.client import SlurmClient

# The alert rules for Prometheus call the same a run behind its plan.
_BEHIND_PLAN = 1.15
# More points than any terminal has columns of dots.
_CURVE_POINTS = 400
# What moves stands above what has ended.
_SAID_BY_STATE = (Symptom.FAILED, Symptom.CANCELLED)
_ORDER = (RunState.RUNNING, RunState.PENDING, RunState.UNKNOWN)


class RunAlert(BaseModel):
    """One thing about a run that deserves attention; `remedy`: what `watch --act` does about it."""

    model_config = ConfigDict(frozen=True)

    name: str
    message: str
    remedy: str = ""


class LiveRow(BaseModel):
    """One run: its status, what its plan promised, the age of its newest checkpoint, alerts."""

    model_config = ConfigDict(frozen=True)

    status: RunStatus
    planned_step_seconds: float | None = None
    saved_seconds_ago: float | None = None
    alerts: tuple[RunAlert, ...] = ()


class LiveView(BaseModel):
    """All runs at `look_time`; `slurm_time`: when Slurm last answered, None if it never has.

    Times in seconds since the epoch. `slurm_silent`: it was asked and did not answer since.
    `poll_seconds`: how often the site of these runs allows to ask it.
    """

    model_config = ConfigDict(frozen=True)

    rows: tuple[LiveRow, ...]
    look_time: float
    poll_seconds: float
    slurm_time: float | None = None
    slurm_silent: bool = False
    cluster: str | None = None


class RunDetails(BaseModel):
    """What is read of the chosen run only: its loss, and what people were not told about it."""

    model_config = ConfigDict(frozen=True)

    run_id: str
    curve: tuple[CurvePoint, ...] = ()
    untold: tuple[NoticeState, ...] = ()


class LiveRuns:
    """Looks at the runs below one directory, again and again."""

    def __init__(self, runs: Path, slurm: SlurmClient, names: Collection[str] = ()) -> None:
        """Look at the runs with these names, or at all of them."""
        self._runs, self._slurm, self._names = runs, slurm, frozenset(names)
        self._jobs: dict[str, RunJobs] = {}
        self._alerts: dict[str, tuple[RunAlert, ...]] = {}
        self._over: dict[str, tuple[tuple[int, ...], LiveRow]] = {}
        self._plans: dict[str, tuple[tuple[int, ...], float | None]] = {}
        self._slurm_time: float | None = None
        self._silent = False

    def look(self, *, ask_slurm: bool = True) -> LiveView:
        """Look at all runs: at most one squeue and one sacct, none unless `ask_slurm`.

        Raises UsageError when the directory of runs cannot be read.
        """
        runs = [one for one in all_runs(self._runs) if not self._names or one.run_id in self._names]
        versions = {run.run_id: _version(run.layout.ledger) for run in runs}
        # Runs that were over, and whose ledgers are as they were, are not read again.
        over = {
            run_id: row for run_id, (at, row) in self._over.items() if at == versions.get(run_id)
        }
        changed = [run for run in runs if run.run_id not in over]
        observed = observe(changed, self._slurm if ask_slurm else None)
        answered = all(one.jobs is None or one.jobs.answered for one in observed)
        if ask_slurm:
            self._silent = not answered
            if answered:
                self._slurm_time = clock.now()
        rows: dict[str, LiveRow] = {}
        for one in observed:
            run_id = one.run.run_id
            if one.jobs is not None and one.jobs.answered:
                self._jobs[run_id] = one.jobs
                self._alerts[run_id] = _problems(one)
            row = rows[run_id] = self._row(one)
            # Unless only Slurm says so: then `watch` may find it orphaned, and submit it again. Or
            # only the ledger: its job has not ended yet, and the row still says RUNNING.
            if one.is_over_by_ledger and row.status.state.over:
                self._over[run_id] = (versions[run_id], row)
        newest_first = [rows.get(run.run_id) or over[run.run_id] for run in reversed(runs)]
        return LiveView(
            rows=tuple(sorted(newest_first, key=_place)),
            poll_seconds=poll_interval(changed),
            look_time=clock.now(),
            slurm_time=self._slurm_time,
            slurm_silent=self._silent,
            cluster=next((one.here for one in self._jobs.values() if one.here), None),
        )

    def _row(self, one: ObservedRun) -> LiveRow:
        """Judge a run, by the last answer of Slurm where there is no new one."""
        run, status = one.run, one.row
        known = self._jobs.get(run.run_id)
        if not status.readable:
            return LiveRow(status=status)
        if one.jobs is not None and not one.jobs.answered and known is not None:
            with contextlib.suppress(NewerFormatError):
                status = replace(one, jobs=known).row
        version = _version(run.layout.plan)
        if run.run_id not in self._plans or self._plans[run.run_id][0] != version:
            plan = None
            with contextlib.suppress(NewerFormatError):
                plan = known_plan(run.layout)
            self._plans[run.run_id] = (version, None if plan is None else plan.step_seconds)
        planned_seconds = self._plans[run.run_id][1]
        saved_seconds_ago = None
        if status.checkpoint_step is not None:
            name = checkpoint_name(status.checkpoint_step)
            with contextlib.suppress(OSError):
                saved = (run.layout.checkpoints / name / MANIFEST_NAME).stat().st_mtime
                saved_seconds_ago = max(0.0, clock.now() - saved)
        alerts = [*self._alerts.get(run.run_id, ())]
        if status.stale and Symptom.STALLED not in {alert.name for alert in alerts}:
            ago = short_duration(status.updated_seconds_ago or 0.0)
            alerts.append(RunAlert(name="silent", message=f"no sign of life for {ago}"))
        if status.state is RunState.RUNNING and status.step_seconds and planned_seconds:
            ratio = status.step_seconds / planned_seconds
            if ratio >= _BEHIND_PLAN:
                message = f"steps take {ratio - 1:.0%} longer than planned; `hpctrain diagnose` "
                alerts.append(RunAlert(name="behind plan", message=f"{message}explains it"))
        return LiveRow(
            status=status,
            planned_step_seconds=planned_seconds,
            saved_seconds_ago=saved_seconds_ago,
            alerts=tuple(alerts),
        )


class ChosenRun:
    """Reads the run that is chosen; the same one again only as far as it has grown."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._curve: tuple[str, GrowingCurve] | None = None

    def read(self, run: RunFiles) -> RunDetails:
        """Read loss and notices; what cannot be read is left out."""
        details = RunDetails(run_id=run.run_id)
        if run.unreadable:
            return details
        with self._lock:
            if self._curve is None or self._curve[0] != run.run_id:
                self._curve = (run.run_id, GrowingCurve(run.layout))
            with contextlib.suppress(NewerFormatError, OSError):
                curve = self._curve[1].read(_CURVE_POINTS)
                details = details.model_copy(update={"curve": curve})
            with contextlib.suppress(NewerFormatError, OSError):
                untold = (one for one in notice_states(run) if one.problem and one.state != "sent")
                details = details.model_copy(update={"untold": tuple(untold)})
        return details


def shown_rows(
    rows: Iterable[LiveRow], *, over: bool, user: str | None, words: str
) -> tuple[LiveRow, ...]:
    """Select the rows to show: of `user` or of everybody, and those that contain all the words.

    Of runs that are over only the newest is shown, unless `over` or words are given.
    """
    found: list[LiveRow] = []
    ended = 0
    for row in rows:
        status = row.status
        text = " ".join((status.run_id, status.state, status.owner or "", status.reason)).casefold()
        if user is not None and status.owner not in (None, user):
            continue
        if not all(word in text for word in words.casefold().split()):
            continue
        if status.state.over and status.state is not RunState.PREPARED and not row.alerts:
            ended += 1
            if ended > 1 and not over and not words:
                continue
        found.append(row)
    return tuple(found)


def _place(row: LiveRow) -> tuple[int, str]:
    """Sort by state, then by name, so that rows stay in their places; what is over stays as is."""
    state = row.status.state
    if not state.over:
        return _ORDER.index(state), row.status.run_id
    return (len(_ORDER), row.status.run_id) if row.alerts else (len(_ORDER) + 1, "")


def _problems(one: ObservedRun) -> tuple[RunAlert, ...]:
    """Find what `watch` would report about a run, also what it has reported already."""
    if one.jobs is None or one.jobs.elsewhere or not generation(one.events):
        return ()
    try:
        watched = snapshot(one)
    except NewerFormatError:
        return ()
    return tuple(
        RunAlert(
            name=found.symptom,
            message=found.message,
            remedy="" if found.remedy is WatchRemedy.TELL else found.remedy,
        )
        for found in (find_problems(watched) if watched is not None else ())
        if found.symptom not in _SAID_BY_STATE
    )


def _version(path: Path) -> tuple[int, ...]:
    """What changes when a file changes; empty for one that is missing."""
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_ino, found.st_mtime_ns, found.st_size


# -- Reads the losses of a run as its metrics grow, so that a live view reads each line once ----


class _StepLoss(NamedTuple):
    """What is kept of a row: a run may have a million of them."""

    step: int
    epoch: int
    loss: float


class GrowingCurve:
    """The loss curve of one run, read on from where the last call has ended."""

    def __init__(self, layout: RunLayout) -> None:
        self._layout = layout
        self._rows: list[_StepLoss] = []
        self._position = 0
        self._inode = 0

    def read(self, points: int) -> tuple[CurvePoint, ...]:
        """Read the rows that were added, and summarize all in at most so many points.

        A torn last line is left for the next call; a file that was replaced is read anew. Raises
        OSError and NewerFormatError.
        """
        try:
            stream = self._layout.metrics.open("rb")
        except FileNotFoundError:
            return ()
        with stream:
            found = os.fstat(stream.fileno())
            if found.st_ino != self._inode or found.st_size < self._position:
                self._rows, self._position, self._inode = [], 0, found.st_ino
            stream.seek(self._position)
            for line in stream:
                if not line.endswith(b"\n"):
                    break
                self._position += len(line)
                row = parse_record(self._layout.metrics, line, StepMetrics)
                if row is not None and row.loss is not None:
                    self._rows.append(_StepLoss(row.step, row.epoch, row.loss))
        return curve_of(self._rows, points)
