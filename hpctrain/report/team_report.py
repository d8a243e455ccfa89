"""Accounts for the GPU-hours of all runs of a team in one window of time (`report --week`).

A service counts as one run: the time in which its replicas work is productive. Belongs here:
reading runs and services, whose they are, and the output document. Does not belong here: which
window (`report_windows`), sums (`team_tally`), classifying time (`hpctrain.telemetry`), text.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict

from hpctrain.base import clock
from hpctrain.base.errors import HpctrainError, NoSuchRunError, UsageError
from hpctrain.judge.attempts import marks_of
from hpctrain.plan.documents import Plan
from hpctrain.plan.job import GpuPrice, gpu_price
from hpctrain.records.find import RunFiles, all_runs, all_services
from hpctrain.records.jobs import cluster_of
from hpctrain.records.layout import RunLayout
from hpctrain.records.run_records import read_saves
from hpctrain.records.step_times import read_step_times
from hpctrain.records.supervise_config import known_supervise_config
from hpctrain.report.report_windows import ReportWindow
from hpctrain.report.team_tally import (
    CauseSpending,
    Spending,
    Tally,
    TimePart,
    causes_of,
    total,
)
from hpctrain.runs.goodput import gpus_held, quiet_seconds_of
from hpctrain.runs.run_documents import known_any_plan, reports_steps
from hpctrain.runs.state import waits_for_person
from hpctrain.serve.replica_lives import held_timeline, job_records, replica_life
from hpctrain.serve.service_files import ServiceFiles
from hpctrain.spec.loader import load_any_run_spec, load_profile, load_service_spec
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.run import RunSpec
from hpctrain.spec.service import ServiceSpec
from hpctrain.spec.trainer import TrainerRunSpec
from hpctrain.telemetry.goodput import needless_epochs, window_accounts
from hpctrain.telemetry.timeline import Mark, MarkKind, ticks, timeline

ProjectSource = Literal["account", "wandb"]
NO_PROJECT = "(none)"
UNKNOWN = "(unknown)"


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class RunSpending(_Frozen):
    """What one run has done in the window. Without `gpus` its GPU-hours are not known, and 0.

    `project_from`: the Slurm account, or the project of W&B where there is no account.
    `price_per_gpu_hour` is that of the profile which the run was submitted with.
    """

    run_id: str
    directory: str
    user: str
    project: str
    project_from: ProjectSource | None
    cluster: str
    engine: str
    gpus: int | None
    price_per_gpu_hour: float | None
    currency: str | None
    over: bool
    spending: Spending
    parts: tuple[TimePart, ...]


class GroupSpending(_Frozen):
    """What the runs of one user, project or cluster have done, and their GPU-hours before."""

    name: str
    spending: Spending
    gpu_hours_before: float


class PeriodSpending(_Frozen):
    """What all runs have done on one day, or in one week of a long window, from `first_day` on."""

    first_day: date
    spending: Spending


class UnreadRun(_Frozen):
    """A run that is not in the report, and why."""

    run_id: str
    directory: str
    reason: str


class TeamReport(_Frozen):
    """The GPU-hours of all runs in a window of time; times are local, with their offset.

    `previous` is the spending from `previous_begin` to `previous_end`. `quiet_runs` are
    runs without any time in the window. `runs` are in descending order of GPU-hours.
    """

    title: str
    zone: str
    begin: datetime
    end: datetime
    previous_begin: datetime
    previous_end: datetime
    made: datetime
    in_progress: bool
    directories: tuple[str, ...]
    total: Spending
    previous: Spending
    by_user: tuple[GroupSpending, ...]
    by_project: tuple[GroupSpending, ...]
    by_cluster: tuple[GroupSpending, ...]
    by_cause: tuple[CauseSpending, ...]
    by_period: tuple[PeriodSpending, ...]
    runs: tuple[RunSpending, ...]
    quiet_runs: int
    unreadable: tuple[UnreadRun, ...]

    @property
    def runs_without_gpus(self) -> tuple[str, ...]:
        """The runs whose GPU-hours are not known."""
        return tuple(run.run_id for run in self.runs if run.gpus is None)


def team_report(
    directories: Sequence[Path], window: ReportWindow, now: float | None = None
) -> TeamReport:
    """Account for all runs of some directories in a window.

    A run that cannot be read is named and not counted. Raises UsageError for what is no directory,
    NoSuchRunError if there is no run at all.
    """
    now = clock.now() if now is None else now
    reader = _Reader(window, now)
    runs: dict[Path, RunFiles] = {}
    services: dict[Path, ServiceFiles] = {}
    for directory in directories:
        if not directory.is_dir():
            raise UsageError(
                f"--runs: {directory} is no directory",
                hint="runs are in $HPCTRAIN_RUNS, ./runs, or where `--runs` points to",
            )
        # What two directories lead to is there once.
        for run in all_runs(directory):
            runs.setdefault(run.layout.directory.resolve(), run)
        for layout in all_services(directory):
            services.setdefault(layout.directory.resolve(), ServiceFiles(layout))
    found: list[RunFiles | ServiceFiles] = [*runs.values(), *services.values()]
    if not found:
        where = ", ".join(map(str, directories))
        raise NoSuchRunError(f"no runs in {where}", hint="no run has been submitted here yet")
    members: list[_Member] = []
    unreadable: list[UnreadRun] = []
    quiet_runs = 0
    for one in found:
        try:
            with _no_cycle_search():
                if isinstance(one, ServiceFiles):
                    member = reader.read_service(one)
                else:
                    one.refuse_unreadable()
                    member = reader.read(one)
        except (HpctrainError, OSError, ValueError) as error:
            reason = error.strerror if type(error) is OSError and error.strerror else str(error)
            place = one.layout.directory
            unread = UnreadRun(run_id=place.name, directory=str(place.parent), reason=reason)
            unreadable.append(unread)
            continue
        quiet_runs += member is None or not member.current.runs
        members += [member] if member is not None else []
    current = total(member.current for member in members)
    previous = total(member.previous for member in members)
    rows = [member.row for member in members if member.current.runs]
    return TeamReport(
        title=window.title,
        zone=window.zone,
        begin=window.local(window.begin),
        end=window.local(window.end),
        previous_begin=window.local(window.previous[0]),
        previous_end=window.local(window.previous[1]),
        made=window.local(now),
        in_progress=window.part,
        directories=tuple(str(directory) for directory in directories),
        total=current.spending(),
        previous=previous.spending(),
        by_user=_grouped(members, lambda member: member.row.user),
        by_project=_grouped(members, lambda member: member.row.project),
        by_cluster=_grouped(members, lambda member: member.row.cluster),
        by_cause=causes_of(current, previous),
        by_period=tuple(
            PeriodSpending(
                first_day=day,
                spending=total(member.periods[number] for member in members).spending(),
            )
            for number, day in enumerate(window.days)
        ),
        runs=tuple(sorted(rows, key=lambda row: (-row.spending.gpu_hours, row.run_id))),
        quiet_runs=quiet_runs,
        unreadable=tuple(unreadable),
    )


@contextmanager
def _no_cycle_search() -> Iterator[None]:
    """Pause the search for reference cycles, which looks again and again at the rows of a run.

    Rows are tuples of numbers without cycles; the search takes longer than reading them.
    """
    paused = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if paused:
            gc.enable()


@dataclass(frozen=True)
class _Member:
    """One run: its row, and its sums in the time before, in each period and in the window."""

    row: RunSpending
    current: Tally
    previous: Tally
    periods: tuple[Tally, ...]

    @classmethod
    def of(
        cls, run: RunFiles, tallies: Sequence[Tally], price: GpuPrice | None, **whose: Any
    ) -> Self:
        """Make the row of a run; the tallies are those of `_Reader`'s bounds."""
        periods = tuple(tallies[2:])  # between them may be the rest of the time before
        current = total(periods)
        row = RunSpending(
            run_id=run.run_id,
            directory=str(run.layout.directory.parent),
            user=run.owner_name or f"uid {run.owner_id}",
            price_per_gpu_hour=price.per_gpu_hour if price else None,
            currency=price.currency if price else None,
            spending=current.spending(),
            parts=current.parts(),
            **whose,
        )
        return cls(row, current, tallies[0], periods)


def _grouped(
    members: Sequence[_Member], name_of: Callable[[_Member], str]
) -> tuple[GroupSpending, ...]:
    """Add up the runs of each name, the one with most GPU-hours first."""
    names: dict[str, list[_Member]] = {}
    for member in members:
        names.setdefault(name_of(member), []).append(member)
    groups = [
        GroupSpending(
            name=name,
            spending=total(member.current for member in of_name).spending(),
            gpu_hours_before=total(m.previous for m in of_name).spending().gpu_hours,
        )
        for name, of_name in names.items()
    ]
    return tuple(sorted(groups, key=lambda one: (-one.spending.gpu_hours, one.name)))


class _Reader:
    """Reads runs for one window; profiles that are equal are read once."""

    def __init__(self, window: ReportWindow, now: float) -> None:
        self._now = now
        moments = (*window.previous, *window.bounds)
        self._bounds = tuple(ticks(moment) for moment in moments)
        self._profiles: dict[bytes, ClusterProfile] = {}

    def read(self, run: RunFiles) -> _Member | None:
        """Read one run; None if it has no time in the window and the time before."""
        layout, events = run.layout, run.ledger.events()
        marks = marks_of(events)
        config, plan = known_supervise_config(layout.supervise_config), known_any_plan(layout)
        quiet_seconds = quiet_seconds_of(config)
        if self._is_elsewhere(layout, marks, quiet_seconds):
            return None
        # The time before, what is left between, and each period of the window.
        steps = read_step_times(layout)
        if needless := needless_epochs(marks, steps, self._bounds[0]):
            steps = [step for step in steps if step.epoch not in needless]
        cut = timeline(
            marks,
            steps,
            read_saves(layout),
            self._now,
            quiet_seconds,
            reports_steps=reports_steps(plan),
        )
        accounts = window_accounts(cut, steps, self._bounds)
        if not any(one.spent or one.kept_steps or one.redone_steps for one in accounts):
            return None
        spec = profile = None
        with contextlib.suppress(HpctrainError, OSError):  # such as of an older version
            spec = load_any_run_spec(layout.spec).document
            profile = self._profile(layout.profile)
        gpus = gpus_held(plan, config)
        price = gpu_price(spec, profile) if spec and profile else None
        images = isinstance(plan, Plan) and plan.unit == "images"
        tallies = []
        for account in accounts:
            tally = Tally()
            tally.count(str(layout.directory), account, gpus or 0, price, images=images)
            tallies.append(tally)
        # Its Slurm account, else its project of W&B.
        project = _account_of(spec, profile)
        project_from: ProjectSource | None = "account" if project else None
        if not project and spec is not None and spec.tracking.wandb is not None:
            project, project_from = spec.tracking.wandb.project, "wandb"
        return _Member.of(
            run,
            tallies,
            price,
            project=project or (NO_PROJECT if spec else UNKNOWN),
            project_from=project_from,
            cluster=cluster_of(events) or (profile.name if profile else UNKNOWN),
            engine=plan.engine if plan else spec.engine.name if spec else UNKNOWN,
            gpus=gpus,
            over=waits_for_person(events, done=layout.done.exists()),
        )

    def read_service(self, service: ServiceFiles) -> _Member | None:
        """Read one service; None if none of its jobs has time in the window and the time before."""
        layout, events, state = service.layout, service.ledger.events(), service.state
        plan, price = service.plan(), None
        spec = profile = None
        with contextlib.suppress(HpctrainError, OSError):
            spec = load_service_spec(layout.spec).document
            profile = self._profile(layout.profile)
            price = gpu_price(spec, profile)
        gpus = plan.replica.gpus if plan else None
        tallies = [Tally() for _ in self._bounds[1:]]
        for name in layout.replica_names():
            job = job_records(service, name)
            life = replica_life(job, events, state, self._now)
            cut = held_timeline(life, job.events, self._now)
            for tally, account in zip(tallies, window_accounts(cut, (), self._bounds), strict=True):
                if account.spent:
                    tally.count(str(layout.directory), account, gpus or 0, price, images=False)
        if not any(tally.runs for tally in tallies):
            return None
        project = _account_of(spec, profile)
        return _Member.of(
            RunFiles(RunLayout(layout.directory)),
            tallies,
            price,
            project=project or (NO_PROJECT if spec else UNKNOWN),
            project_from="account" if project else None,
            cluster=profile.name if profile else UNKNOWN,
            engine=plan.replica.engine if plan else UNKNOWN,
            gpus=plan.gpus if plan else None,
            over=service.is_over(state),
        )

    def _is_elsewhere(self, layout: RunLayout, marks: Sequence[Mark], quiet_seconds: float) -> bool:
        """Tell by the ledger alone whether a run was over before, or began after the window."""
        known = timeline(marks, (), (), self._now, quiet_seconds).segments
        begins = marks[0].kind in (MarkKind.SUBMITTED, MarkKind.ATTEMPT_STARTED) if marks else False
        if known and begins and known[0].start >= self._bounds[-1]:
            return True
        if known and known[-1].end > self._bounds[0]:
            return False
        try:  # a ledger may have lost the line of a launch that has trained since
            return ticks(layout.metrics.stat().st_mtime) < self._bounds[0]
        except FileNotFoundError:
            return True

    def _profile(self, path: Path) -> ClusterProfile:
        text = path.read_bytes()
        if text not in self._profiles:
            self._profiles[text] = load_profile(path).document
        return self._profiles[text]


def _account_of(
    spec: RunSpec | TrainerRunSpec | ServiceSpec | None, profile: ClusterProfile | None
) -> str | None:
    """Find the Slurm account that jobs are charged to: the spec's, else that of the partition."""
    if spec is None:
        return None
    site = profile.for_partition(spec.resources.partition) if profile else None
    return spec.resources.account or (site.slurm.account if site else None)
