"""Plans and checks every point of a sweep before anything is written or submitted.

Belongs here: from a grid to prepared runs, all problems of all points at once, the sum of the
forecasts. Does not belong here: the grammar of the grid (`hpctrain.trials.sweep_grid`),
submitting (`sweep`), states (`sweep_table`).
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hpctrain.base import clock
from hpctrain.base.disk_usage import directory_facts
from hpctrain.base.errors import (
    DoesNotFitError,
    HpctrainError,
    InvalidInputError,
    LimitError,
    NoSuchRunError,
    Problem,
    RefusedPlanError,
    UsageError,
)
from hpctrain.base.units import short_bytes, short_hours
from hpctrain.job.footprint import footprint_of
from hpctrain.job.preflight import Check, Examined, checks_of, input_checks
from hpctrain.job.prepare import Prepared, load_inputs, prepare
from hpctrain.plan.forecast.predict import run_facts
from hpctrain.records.sweeps import SweepLayout, SweepPoint, SweepRecord
from hpctrain.simulate.forecasts import forecast_run
from hpctrain.spec.profile import ClusterProfile
from hpctrain.trials.sweep_grid import (
    OPTION,
    GridAxis,
    GridPoint,
    grid_points,
    nearest_smaller,
    parse_grid,
)

_SKIP = "--skip-refused"
# Sections of a spec on which no check of data, weights and software depends.
_UNCHECKED = {"name", "optimizer", "schedule", "seed", "resources", "supervise", "logging"}
_MOST_NAMED = 3


@dataclass(frozen=True)
class SweepRequest:
    """What the command line or a program asks for.

    `name` is that of the sweep; None: made from the spec's name and the digest of the request.
    """

    spec: Path
    profile: str
    grid: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    name: str | None = None
    at_a_time: int | None = None
    most_gpu_hours: float | None = None
    skip_refused: bool = False
    template_directory: Path | None = None


@dataclass(frozen=True)
class PlannedPoint:
    """One point: its run if it can run, else the error; `existing` if its run is there already.

    `removed`: its run has had a job, and its directory is gone.
    """

    point: GridPoint
    prepared: Prepared | None = None
    gpu_hours: float | None = None
    error: HpctrainError | None = None
    run_id: str | None = None
    existing: bool = False
    removed: bool = False

    @property
    def runs(self) -> bool:
        return self.prepared is not None or self.existing


@dataclass(frozen=True)
class SweepPlan:
    """All points of a sweep, looked at; `record` is what will be on disk."""

    layout: SweepLayout
    record: SweepRecord
    axes: tuple[GridAxis, ...]
    points: tuple[PlannedPoint, ...]
    partition: str

    @property
    def refused(self) -> tuple[PlannedPoint, ...]:
        return tuple(one for one in self.points if one.error is not None)

    @property
    def new(self) -> tuple[PlannedPoint, ...]:
        """The points whose run directories are still to be written."""
        return tuple(one for one in self.points if one.prepared is not None)

    @property
    def gpu_hours(self) -> float | None:
        """The sum of the forecasts; None where a point has none."""
        hours = [one.gpu_hours for one in self.points if one.runs]
        return None if None in hours else sum(one for one in hours if one is not None)


@dataclass
class _Shared:
    """What points have in common is computed once: checks of inputs, played runs."""

    checks: dict[str, tuple[Check, ...]] = field(default_factory=dict)
    hours: dict[str, float | None] = field(default_factory=dict)


def plan_sweep(request: SweepRequest, runs: Path) -> SweepPlan:
    """Plan all points, or those that an earlier call has not written yet.

    Raises InvalidInputError or RefusedPlanError with the problems of all points, each with the
    points that it is about; UsageError for a grid that makes no sense, a budget that is exceeded,
    and a name that another sweep has.
    """
    if str(request.spec) == "-":
        raise UsageError("a spec on standard input can be read only once", hint="give a file")
    axes = parse_grid(request.grid)
    # The first point whose documents are valid names the sweep.
    errors: dict[str, HpctrainError] = {}
    for candidate in grid_points(axes, "run"):
        try:
            first, site = load_inputs(
                request.spec, request.profile, (*request.overrides, *candidate.overrides)
            )
            break
        except InvalidInputError as error:
            errors[label(axes, candidate.values)] = error
    else:
        raise _all_problems(errors, len(errors), 0)
    digest = hashlib.sha256(
        "\n".join((first.digest, site.digest, *map(str, axes))).encode()
    ).hexdigest()
    name = request.name or f"sweep-{first.document.name}-{digest[:4]}"
    layout, record = _layout_and_record(name, digest, runs)
    known = {one.name: one for one in record.points} if record else {}
    shared = _Shared()
    planned = tuple(
        (_known_point(point, known[point.name], layout) if record else None)
        or _planned_point(request, point, runs, shared)
        for point in grid_points(axes, first.document.name)
    )
    if record is None:
        record = SweepRecord(
            sweep_id=layout.directory.name,
            digest=digest,
            begun_time=clock.now(),
            run_name=first.document.name,
            profile_name=site.document.name,
            fields=tuple(axis.field for axis in axes),
            points=tuple(
                SweepPoint(
                    values=one.point.values,
                    name=one.point.name,
                    run_id=one.run_id,
                    gpu_hours=one.gpu_hours,
                    refusal=None if one.error is None else str(one.error).splitlines()[0],
                )
                for one in planned
            ),
            at_a_time=request.at_a_time,
        )
    partition = site.document.slurm.partition(first.document.resources.partition)
    plan = SweepPlan(layout, record, axes, planned, partition.name if partition else "")
    _refuse(plan, request, site.document, runs)
    return plan


def _layout_and_record(
    name: str, digest: str, runs: Path
) -> tuple[SweepLayout, SweepRecord | None]:
    """Open a sweep, and read its record if an earlier call has begun it."""
    if "/" in name or name.startswith("."):
        raise UsageError(f"--name {name}: a sweep is named like a directory")
    layout = SweepLayout((runs / name).absolute())
    try:
        record = layout.read()
    except NoSuchRunError:
        if layout.directory.exists() and not (layout.directory / "lock").exists():
            raise UsageError(
                f"{layout.directory} exists already and is no sweep", hint="`--name` another one"
            ) from None
        return layout, None
    if record.digest != digest:
        raise UsageError(
            f"sweep `{name}` is there already, of another spec, profile or grid",
            hint="`--name` another one",
        )
    if layout.is_cancelled(record):
        raise UsageError(
            f"sweep `{name}` was cancelled",
            hint="`hpctrain resume RUN` continues one of its runs; `--name` makes another sweep",
        )
    return layout, record


def _known_point(point: GridPoint, known: SweepPoint, layout: SweepLayout) -> PlannedPoint | None:
    """Take a point over from the record; None if its run directory is still to be written.

    Raises UsageError for the directory of a run that has had a job and has no ledger any more.
    """
    if known.run_id is None:
        error = UsageError(known.refusal or "refused when the sweep was begun")
        return PlannedPoint(point, error=error)
    if not is_written(layout, known.run_id):
        directory = layout.runs / known.run_id
        if not known.submitted:
            return None
        if os.path.lexists(directory):
            raise UsageError(
                f"{directory} has no ledger.jsonl, and its run has had a job",
                hint="put ledger.jsonl back, or move the directory away",
            )
        return PlannedPoint(point, run_id=known.run_id, removed=True)
    return PlannedPoint(point, gpu_hours=known.gpu_hours, run_id=known.run_id, existing=True)


def is_written(layout: SweepLayout, run_id: str) -> bool:
    """Return True if the run directory is complete: its ledger begins with its last file."""
    return (layout.runs / run_id / "ledger.jsonl").exists()


def _planned_point(
    request: SweepRequest, point: GridPoint, runs: Path, shared: _Shared
) -> PlannedPoint:
    """Prepare and check one point, as `submit` does, and forecast its GPU-hours."""
    overrides = (*request.overrides, *point.overrides, f"name={point.name}")
    try:
        prepared = prepare(
            request.spec,
            request.profile,
            overrides,
            runs=runs,
            template_directory=request.template_directory,
        )
        inputs = prepared.spec.document.model_dump_json(exclude=_UNCHECKED)
        if inputs not in shared.checks:
            shared.checks[inputs] = input_checks(
                prepared.spec, prepared.profile, prepared.facts.python
            )
        Examined(checks_of(prepared, runs, shared.checks[inputs]), prepared).refuse()
    except (InvalidInputError, DoesNotFitError, LimitError) as error:
        return PlannedPoint(point, error=error)
    job, hours = prepared.job, None
    facts = run_facts(job)
    if facts is not None:  # points that differ in numbers only share one forecast
        sections = {"checkpoint", "evaluation", "supervise", "resources"}
        key = facts.model_dump_json() + job.spec.model_dump_json(include=sections)
        if key not in shared.hours:
            try:
                shared.hours[key] = forecast_run(job, facts).gpu_hours
            except DoesNotFitError:
                shared.hours[key] = None
        hours = shared.hours[key]
    return PlannedPoint(point, prepared, hours, run_id=prepared.run_id)


def label(axes: Sequence[GridAxis], values: Sequence[str]) -> str:
    """Name a point in a message, with its fields as they are in the spec."""
    return " ".join(f"{axis.field}={value}" for axis, value in zip(axes, values, strict=True))


# What keeps a sweep from being submitted ---------------------------------------------------------


def _refuse(plan: SweepPlan, request: SweepRequest, site: ClusterProfile, runs: Path) -> None:
    """Raise for points that cannot run, a chain that cannot be limited, and a budget."""
    new_refusals = {
        label(plan.axes, one.point.values): one.error
        for one in plan.refused
        if one.error is not None and not isinstance(one.error, UsageError)
    }
    # Points whose values are the same, however they are written.
    new = {label(plan.axes, one.point.values): one.prepared for one in plan.new if one.prepared}
    seen: dict[str, str] = {}
    for here, prepared in new.items():
        spec = prepared.spec.document.model_dump_json(exclude={"name"})
        if spec in seen:
            raise UsageError(
                f"{OPTION}: {seen[spec]} and {here} are the same point",
                hint="leave one of them out",
            )
        seen[spec] = here
    runnable = sum(one.runs for one in plan.points)
    if new_refusals and not (request.skip_refused and runnable):
        raise _all_problems(new_refusals, len(plan.points), runnable)
    limit = request.at_a_time or plan.record.at_a_time
    if limit is not None and limit < runnable and site.continuation == "chain":
        raise UsageError(
            f"--at-a-time {limit}: with continuation chain each job of a run submits the next one, "
            "so Slurm knows no job whose end is the end of the run",
            hint="leave --at-a-time out, or another `continuation` in the profile",
        )
    # Each run may fit into its file system, and all together do not.
    left = directory_facts(runs)
    if left.free_bytes is not None and left.free_inodes is not None and len(new) > 1:
        try:
            needed = [footprint_of(prepared) for prepared in new.values()]
        except DoesNotFitError:  # a run that makes no progress by forecast has no footprint
            needed = []
        size_bytes = sum(one.bytes.peak_checkpoints for one in needed)
        files = sum(one.inodes.at_end for one in needed)
        if size_bytes > left.free_bytes or (files > left.free_inodes and left.inodes != 0):
            message = (
                f"{short_bytes(left.free_bytes)} and {left.free_inodes:,} files are left for "
                f"{runs}; the {len(needed)} runs take {short_bytes(size_bytes)} for checkpoints "
                f"and {files:,} files"
            )
            hint = "fewer checkpoints (`checkpoint.keep`), fewer points, or another directory: "
            raise InvalidInputError([Problem(message, hint=f"{hint}`--runs`")])
    limit_hours = request.most_gpu_hours
    if limit_hours is None:
        return
    total = plan.gpu_hours
    if total is None:
        raise UsageError(
            "--max-gpu-hours needs a predicted step time, and there is none",
            hint="add `gpu.peak` and `gpu.memory_bandwidth` to the profile",
        )
    if total <= limit_hours:
        return
    positions = itertools.product(*(range(len(axis.values)) for axis in plan.axes))
    hours = {
        at: one.gpu_hours
        for at, one in zip(positions, plan.points, strict=True)
        if one.runs and one.gpu_hours is not None
    }
    smaller = nearest_smaller(plan.axes, hours, limit_hours)
    if smaller is None:
        least = min(one.gpu_hours for one in plan.points if one.gpu_hours is not None)
        hint = f"not even one run is within it: the smallest takes {short_hours(least)} GPU-hours"
    else:
        axes, sum_ = smaller
        hint = f"{' '.join(map(str, axes))} takes {short_hours(sum_)} GPU-hours"
    message = (
        f"{runnable} runs are forecast to take {short_hours(total)} GPU-hours, and "
        f"`--max-gpu-hours` is {short_hours(limit_hours)}"
    )
    raise RefusedPlanError(message, hint)


def _all_problems(
    errors: dict[str, HpctrainError], count: int, runnable: int
) -> InvalidInputError | RefusedPlanError:
    """Put the problems of all points into one error, each once, with the points it is about."""
    found: dict[Problem, list[str]] = {}
    hints: list[str] = []
    for point, error in errors.items():
        problems: Sequence[Problem]
        if isinstance(error, InvalidInputError):
            problems = error.problems
        else:
            problems = [Problem(line) for line in str(error).splitlines()]
            hints += [error.hint] if error.hint else []
        for problem in problems:
            found.setdefault(problem, []).append(point)
    named = []
    for problem, points in found.items():
        if len(points) < count and not (problem.file or "").startswith(OPTION):
            more = len(points) - _MOST_NAMED
            text = "; ".join(points[:_MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")
            problem = replace(problem, message=f"{problem.message} [{text}]")
        named.append(problem)
    skip = f"`{_SKIP}` submits the other {runnable} of {count} points" if runnable else ""
    if all(isinstance(error, RefusedPlanError) for error in errors.values()):
        hint = "; ".join(dict.fromkeys([*hints, *([skip] if skip else [])]))
        return RefusedPlanError("\n".join(map(str, named)), hint or None)
    if skip:
        last = named[-1]
        named[-1] = replace(last, hint=f"{last.hint}; {skip}" if last.hint else skip)
    return InvalidInputError(named)
