"""Collects what the page about a run shows, from its directory and one answer of Slurm.

Belongs here: which facts the page has, each with the reason where it cannot be read. Does not
belong here: finding them (`status`, `goodput`, `describe`, `diagnose`, `report_measures`), HTML
(`hpctrain.report`).
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict

from hpctrain.base import clock
from hpctrain.base.errors import HpctrainError, UsageError
from hpctrain.diagnose.of_run import Diagnosis, diagnose
from hpctrain.plan.documents import Plan
from hpctrain.plan.trainer_plan import TrainerPlan
from hpctrain.records.find import RunFiles
from hpctrain.records.jobs import cluster_of, submitted_ids
from hpctrain.records.kept_code import read_kept_script
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import Event, EventKind
from hpctrain.records.run_records import (
    RankTimes,
    lineage,
    read_communication,
    read_metrics,
    read_record,
)
from hpctrain.records.software import SoftwareLock, read_lock
from hpctrain.report.measures import (
    Curves,
    MeasuredMessages,
    MeasuredSpeed,
    RankWindow,
    Span,
    curves_of,
    messages_of,
    spans_of,
    speed_of,
    window_of,
)
from hpctrain.runs.checkpoint_list import CheckpointReport, report_checkpoints
from hpctrain.runs.describe import RunStory, describe
from hpctrain.runs.goodput import goodput, read_history
from hpctrain.runs.log_errors import LaunchErrors, launch_errors
from hpctrain.runs.run_documents import known_any_plan
from hpctrain.runs.state import RunState
from hpctrain.runs.status import ObservedRun, RunStatus, observe
from hpctrain.slurm.client import SlurmClient
from hpctrain.spec.loader import load_any_run_spec
from hpctrain.telemetry.goodput import Goodput

# -- Finds which scripts the jobs of a run had, and what differs from one to the next -----------


_MOST_LINES = 400


class ScriptVersion(BaseModel):
    """One text of the script, and the jobs that were submitted with it one after the other.

    `job_ids` is empty for a script that was edited and not submitted since. `text` is None where no
    copy was kept; `changes` are the lines of a unified diff to the version before.
    """

    model_config = ConfigDict(frozen=True)

    sha256: str
    job_ids: tuple[int, ...]
    text: str | None
    changes: tuple[str, ...] = ()


def script_versions(layout: RunLayout, events: Sequence[Event]) -> tuple[ScriptVersion, ...]:
    """List the versions, oldest first; the newest is what the next job will have.

    Raises OSError when the script of the run cannot be read.
    """
    current = layout.script.read_bytes()
    digest = hashlib.sha256(current).hexdigest()
    used: list[tuple[str, tuple[int, ...]]] = []
    named = [event for event in events if event.script_sha256 is not None]
    for sha256, group in itertools.groupby(named, lambda event: str(event.script_sha256)):
        used.append((sha256, tuple(submitted_ids(list(group)))))
    if not used or used[-1][0] != digest:
        used.append((digest, ()))
    versions: list[ScriptVersion] = []
    for sha256, jobs in used:
        text = read_kept_script(layout, sha256)
        if text is None and sha256 == digest:
            text = current.decode(errors="replace")
        before = versions[-1].text if versions else None
        changes: tuple[str, ...] = ()
        if before is not None and text is not None:
            old, new = before.splitlines(), text.splitlines()
            lines = difflib.unified_diff(old, new, lineterm="", n=2)
            changes = tuple(lines)[2:_MOST_LINES]  # without the names of files
        versions.append(ScriptVersion(sha256=sha256, job_ids=jobs, text=text, changes=changes))
    return tuple(versions)


# ----------------------------------------------------------------------------------------------


# Events of a ledger that say that something was not as it should be, and their words.
_REMARKABLE = {
    EventKind.WATCH: "watch",
    EventKind.SLOW_RANK: "slow rank",
    EventKind.CHECKPOINT_REJECTED: "checkpoint rejected",
    EventKind.ROLLED_BACK: "rolled back",
    EventKind.TRACKING_FAILED: "tracking failed",
    EventKind.SUBMIT_FAILED: "submission failed",
    EventKind.FRESH_START_ACCEPTED: "fresh start accepted",
    EventKind.DATA_ACCEPTED: "changed data accepted",
    EventKind.UPGRADED: "upgraded",
}
_PartT = TypeVar("_PartT")


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class Unread(_Frozen):
    """A part of the page that cannot be shown, and why."""

    part: str
    reason: str


class RunReport(_Frozen):
    """Everything that the page about one run shows; None and empty: not known.

    `made_time`: when it was collected, in seconds since the epoch. `spec`: its values by their
    dotted names, as they stand in YAML. `trainer`: the plan of a run with a trainer of its own, of
    which nothing was predicted; then `plan` is None. `happenings`: something remarkable each: when
    (seconds since the epoch), what, and its words.
    """

    run_id: str
    directory: str
    made_time: float
    status: RunStatus
    cluster: str | None = None
    account: str | None = None
    partition: str | None = None
    spec: dict[str, str] = {}
    plan: Plan | None = None
    trainer: TrainerPlan | None = None
    story: RunStory | None = None
    goodput: Goodput | None = None
    spans: tuple[Span, ...] = ()
    curves: Curves | None = None
    speed: MeasuredSpeed | None = None
    window: RankWindow | None = None
    messages: MeasuredMessages | None = None
    checkpoints: CheckpointReport | None = None
    diagnosis: Diagnosis | None = None
    errors: LaunchErrors | None = None
    happenings: tuple[tuple[float, str, str], ...] = ()
    scripts: tuple[ScriptVersion, ...] = ()
    software: SoftwareLock | None = None
    unread: tuple[Unread, ...] = ()

    @property
    def fullest_bytes(self) -> int | None:
        """What PyTorch has allocated on the fullest GPU."""
        stages = self.window.stages if self.window else ()
        return max((one.allocated_bytes for one in stages if one.allocated_bytes), default=None)

    def why_not(self, part: str) -> str | None:
        """Return why a part cannot be shown; None if it can, or if there is nothing to show."""
        return next((one.reason for one in self.unread if one.part == part), None)


def collect_reports(
    runs: Sequence[RunFiles], slurm: SlurmClient | None, now: float | None = None
) -> tuple[RunReport, ...]:
    """Collect the pages of runs; Slurm is asked at most once for all, and not without `slurm`.

    Raises UsageError for a run that cannot be read at all.
    """
    now = clock.now() if now is None else now
    observed = observe(runs, slurm)
    for run in runs:
        run.refuse_unreadable()
    return tuple(_collected(one, now, asked=slurm is not None) for one in observed)


class PartReader:
    """Reads the parts of a page; one that cannot be read takes no other one with it."""

    def __init__(self) -> None:
        self.unread: list[Unread] = []

    def read(self, name: str, part: Callable[[], _PartT]) -> _PartT | None:
        """Read one part, or note why it cannot be read."""
        try:
            return part()
        except (HpctrainError, OSError, ValueError, TypeError, KeyError) as error:
            reason = error.strerror if type(error) is OSError and error.strerror else str(error)
            self.unread.append(Unread(part=name, reason=reason))
            return None


def _collected(observed: ObservedRun, now: float, *, asked: bool) -> RunReport:
    run, row, events = observed.run, observed.row, observed.events
    layout, parts = run.layout, PartReader()
    if not row.readable:  # perhaps for another of its files
        events = parts.read("ledger", run.ledger.events) or []
    elif row.state is RunState.UNKNOWN and not asked:
        row = row.model_copy(update={"reason": "Slurm was not asked"})
    any_plan = parts.read("plan", lambda: known_any_plan(layout))
    trainer = any_plan if isinstance(any_plan, TrainerPlan) else None
    plan = any_plan if isinstance(any_plan, Plan) else None
    if any_plan is None and not any(one.part == "plan" for one in parts.unread):
        parts.unread.append(Unread(part="plan", reason="plan.json cannot be read"))
    spec = parts.read("spec", lambda: load_any_run_spec(layout.spec).document)
    update: dict[str, Any] = {}
    rows = parts.read("time", lambda: read_metrics(layout))
    history = parts.read("time", lambda: read_history(run, now, rows, events))
    if rows is not None and history is not None:
        counted = lineage(rows)
        update["goodput"] = parts.read("time", lambda: goodput(run, now, history))
        update["spans"] = spans_of(history.timeline, events)
        update["curves"] = curves_of(rows, counted)
        update["speed"] = speed_of(counted, plan)
        update["diagnosis"] = parts.read(
            "diagnosis", lambda: _unless_early(lambda: diagnose(run, price=False, rows=rows))
        )
    times = parts.read("ranks", lambda: read_record(layout.rank_times, RankTimes))
    measured = parts.read("messages", lambda: read_communication(layout))
    return RunReport(
        run_id=run.run_id,
        directory=str(layout.directory),
        made_time=now,
        status=row,
        cluster=cluster_of(events),
        account=spec.resources.account if spec else None,
        partition=spec.resources.partition if spec else None,
        spec=_values(spec.model_dump(mode="json", by_alias=True)) if spec else {},
        plan=plan,
        trainer=trainer,
        story=parts.read("story", lambda: describe(run, events)),
        window=window_of(times, plan) if times else None,
        messages=messages_of(measured, plan) if measured else None,
        checkpoints=parts.read("checkpoints", lambda: report_checkpoints(run, now=now)),
        errors=parts.read("errors", lambda: _unless_early(lambda: launch_errors(run))),
        happenings=tuple(
            (
                event.time,
                _REMARKABLE[event.event],
                ": ".join(
                    one for one in (event.symptom, event.node, event.reason) if one is not None
                ),
            )
            for event in events
            if event.event in _REMARKABLE
        ),
        scripts=parts.read("script", lambda: script_versions(layout, events)) or (),
        software=parts.read("software", lambda: read_lock(layout)),
        unread=tuple(parts.unread),
        **update,
    )


def _unless_early(read: Callable[[], _PartT]) -> _PartT | None:
    """Read a part; None before the run has a launch or a step that it is about."""
    try:
        return read()
    except UsageError:
        return None


def _values(document: object, name: str = "") -> dict[str, str]:
    """List all values of a document by their dotted names."""
    if isinstance(document, dict) and document:
        found: dict[str, str] = {}
        for key, value in document.items():
            found |= _values(value, f"{name}.{key}" if name else str(key))
        return found
    if isinstance(document, list):
        return {name: ", ".join(map(str, document))}
    return {name: "" if document is None else str(document)}
