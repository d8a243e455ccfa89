"""What a run of this site has measured, and what the planner says of it: the input of `calibrate`.

Belongs here: which steps of a run count, which runs teach nothing and why, and pricing the layout
that was run. Does not belong here: the update of beliefs (`hpctrain.plan.uncertainty`), the site's
file (`calibrate_runs`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.base.errors import HpctrainError, InvalidInputError, Problem
from hpctrain.base.frozen import Frozen
from hpctrain.judge.attempts import launch_starts
from hpctrain.plan.documents import Plan
from hpctrain.plan.job import spec_as_planned
from hpctrain.plan.layout_words import DEFAULT_ORDER
from hpctrain.plan.trainer_plan import TrainerPlan
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import Ledger
from hpctrain.records.run_records import (
    RankTimes,
    StepMetrics,
    lineage,
    read_metrics,
    read_record,
    read_saves,
)
from hpctrain.records.software import SoftwareRecord, read_software
from hpctrain.records.speed_checks import read_speed_checks
from hpctrain.runs.run_documents import known_any_plan
from hpctrain.spec.calibration import LearnedMultiplier, OwnRun, RunOrigin, SiteLearning
from hpctrain.spec.catalogue import Gpu, GpuCatalogue, cluster_gpu, match_gpu
from hpctrain.spec.engines.abilities import MEGATRON_CORE
from hpctrain.spec.engines.registry import abilities_of
from hpctrain.spec.loader import load_profile, load_run_spec
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.run import RunSpec

if TYPE_CHECKING:
    from hpctrain.plan.request import Knowledge
    from hpctrain.plan.uncertainty.learning import Lesson, SeenRun


LEAST_FIT = 0.01  # of what has run: a plan must not refuse it
FEWEST_STEPS = 10  # that count: fewer say little about their median
_WARM_UP_SHARE, _WARM_UP_STEPS = 0.1, 3  # of each launch: memory and kernels are set up
_SLOWEST = 1.5  # of the median: steps beyond were held up by something else


@dataclass(frozen=True)
class MeasuredRun:
    """What one run has measured on the layout of its plan.

    `profile`: name of the one that it was submitted with. `allocated_bytes` and `reserved_bytes`:
    PyTorch's peaks on the fullest GPU; `pass_seconds`: of the passes of the slowest stage in a
    step, by ranks of megatron-core. None where no rank has reported them.
    """

    origin: RunOrigin
    profile: str
    spec: RunSpec
    seconds: float
    allocated_bytes: int | None
    reserved_bytes: int | None
    pass_seconds: float | None = None


def read_measured_run(directory: Path, gpu: Gpu, catalogue: GpuCatalogue) -> MeasuredRun:
    """Read what a run has measured. Raises InvalidInputError with the one reason why not."""
    layout = RunLayout(directory)
    plan = known_any_plan(layout)
    if isinstance(plan, TrainerPlan):
        message = "has a trainer of its own, of which nothing is predicted that it could correct"
        raise _refused(directory, message, "give runs of hpctrain's engines")
    if plan is None:
        raise _refused(directory, "has no plan of this version", "give directories of runs")
    if on_cpus := cpu_problems([directory]):
        raise InvalidInputError(on_cpus)
    spec = _allowed(spec_as_planned(load_run_spec(layout.spec).document, plan))
    own = load_profile(layout.profile)
    found = read_software(layout)
    other = _other_gpu(own.document, found, plan.gpu_memory_bytes, gpu, catalogue)
    if other is not None:
        message = f"ran on `{other}`, and the profile's GPU is `{gpu.name}`"
        raise _refused(directory, message, "give the profile of the cluster on which it ran")
    rows = counted_rows(layout, plan)
    if len(rows) < FEWEST_STEPS:
        message = f"has {len(rows)} steps that count, {FEWEST_STEPS} are needed"
        hint = "warm-up, saves, evaluations, profiled steps and slow nodes do not count"
        raise _refused(directory, message, hint)
    times = read_record(layout.rank_times, RankTimes)
    # on fewer nodes a GPU holds a larger share of the optimizer's state
    if times is not None and times.epoch in _other_launches(layout, plan):
        times = None
    facts = found[-1].facts if found else None
    origin = RunOrigin(
        run=layout.run_id,
        day=f"{datetime.fromtimestamp(rows[-1].time, UTC):%Y-%m-%d}",
        nodes=tuple(sorted(set(times.nodes))) if times else (),
        steps=len(rows),
        hpctrain=(facts.hpctrain or "") if facts else "",
        software=f"torch {facts.torch}" if facts else "",
    )
    return MeasuredRun(
        origin=origin,
        profile=own.document.name,
        spec=spec,
        seconds=statistics.median(row.step_seconds or 0.0 for row in rows),
        allocated_bytes=max(times.peak_memory_bytes, default=0) or None if times else None,
        reserved_bytes=max(times.reserved_memory_bytes, default=0) or None if times else None,
        pass_seconds=_pass_seconds(plan, times) if times else None,
    )


def cpu_problems(directories: Sequence[Path]) -> list[Problem]:
    """Say of runs on CPUs that they teach nothing about GPUs."""
    plans = ((directory, known_any_plan(RunLayout(directory))) for directory in directories)
    return [
        Problem(
            "ran on CPUs: nothing follows for GPUs", str(directory), hint="give runs of the cluster"
        )
        for directory, plan in plans
        if plan is not None and plan.accelerator == "cpu"
    ]


def _other_gpu(
    profile: ClusterProfile,
    software: Sequence[SoftwareRecord],
    memory_bytes: int,
    gpu: Gpu,
    catalogue: GpuCatalogue,
) -> str | None:
    """Name another GPU than `gpu` that a run was planned for, or that its ranks have found."""
    known = profile.gpu.model is not None or match_gpu(catalogue, profile.gpu.type)
    if known and (planned := cluster_gpu(catalogue, profile).name) != gpu.name:
        return planned
    for name in sorted({name for record in software for name in record.facts.gpus}):
        # 40 and 80 GB of one kind have one name; what the catalogue lacks is another GPU
        near = match_gpu(catalogue, name, memory_bytes)
        other = near or match_gpu(catalogue, name)
        if (other is None and gpu.generation != "other") or (other and other.name != gpu.name):
            return other.name if other else name
    return None


def _pass_seconds(plan: Plan, times: RankTimes) -> float | None:
    """Return the passes of the slowest stage: the median over its ranks, so that one slow node
    does not count; None where ranks cannot tell passes from waiting, or are not those of the plan.
    """
    layout, ranks = plan.layout, len(times.compute_seconds)
    if abilities_of(plan.engine).model_classes != MEGATRON_CORE or ranks != layout.world_size:
        return None
    if layout.order == DEFAULT_ORDER:
        stages = [rank // (ranks // layout.pp) for rank in range(ranks)]
    else:
        stages = [rank // (layout.tp * layout.cp) % layout.pp for rank in range(ranks)]
    by_stage = [
        statistics.median(
            seconds for seconds, own in zip(times.compute_seconds, stages, strict=True) if own == n
        )
        for n in range(layout.pp)
    ]
    return max(by_stage) or None


def measured_job(name: str, spec: RunSpec, seconds: float) -> MeasuredRun:
    """Describe a job of `make gpu`, whose spec has the layout that was trained."""
    origin = RunOrigin(run=name, day="", steps=FEWEST_STEPS)
    return MeasuredRun(origin, "", _allowed(spec), seconds, None, None)


def _allowed(spec: RunSpec) -> RunSpec:
    """Let a spec be planned however improbable it is that what has run fits."""
    return spec.model_copy(update={"fit_probability": LEAST_FIT})


def counted_rows(layout: RunLayout, plan: Plan) -> list[StepMetrics]:
    """Select the steps that show the speed of the planned layout.

    Left out: smaller steps of a ramp-up, the first steps of each launch, steps in which something
    was saved, evaluated or profiled and the ones behind saves, launches on other numbers of nodes
    than planned or with a part that their check has found slow, and steps that something else has
    held up.
    """
    other = _other_launches(layout, plan)
    saved = {save.step for save in read_saves(layout)}
    saved |= {step + 1 for step in saved}
    launches: dict[int, list[StepMetrics]] = {}
    for row in lineage(read_metrics(layout)):
        launches.setdefault(row.epoch, []).append(row)
    kept: list[tuple[StepMetrics, float]] = []
    for epoch, rows in launches.items():
        if epoch in other:
            continue
        first = max(_WARM_UP_STEPS, round(_WARM_UP_SHARE * min(len(rows), 100)))
        kept += [
            (row, row.step_seconds)
            for row in rows[first:]
            if not row.profiled
            and row.eval_loss is None
            and row.step not in saved
            and row.step > plan.batch.ramp_steps
            and row.step_seconds is not None
        ]
    if not kept:
        return []
    usual = statistics.median(seconds for _, seconds in kept)
    return [row for row, seconds in kept if seconds <= _SLOWEST * usual]


def _other_launches(layout: RunLayout, plan: Plan) -> set[int]:
    """Find launches that were not as planned."""
    found = {
        event.epoch
        for event in launch_starts(Ledger(layout.ledger).events())
        if event.epoch is not None and event.launch_nodes not in (None, plan.nodes.nodes)
    }
    return found | {check.epoch for check in read_speed_checks(layout) if check.slow}


def _refused(directory: Path, message: str, hint: str) -> InvalidInputError:
    return InvalidInputError([Problem(message, str(directory), hint=hint)])


def readable(
    directories: Sequence[Path], gpu: Gpu, catalogue: GpuCatalogue
) -> tuple[list[MeasuredRun], list[Problem]]:
    """Read all runs; returns those that teach something, and why the others do not."""
    found: list[MeasuredRun] = []
    problems: list[Problem] = []
    for directory in directories:
        try:
            found.append(read_measured_run(directory, gpu, catalogue))
        except InvalidInputError as error:
            problems += error.problems[:1]
        except HpctrainError as error:
            problems.append(Problem(str(error).splitlines()[0], str(directory)))
    return found, problems


# -- What measured runs of one engine teach the planner about one cluster -----------------------


# Measured over planned, or the other way round: beyond it something else was slow, or the run is
# not what its plan says.
_IMPLAUSIBLE = 3.0
_ODD = 2.5  # deviations of the next step time: one run in eighty is further off


class EngineLearning(Frozen):
    """What the runs of one engine have taught."""

    engine: str
    learned: SiteLearning
    multipliers: tuple[LearnedMultiplier, ...]


def planned_again(run: MeasuredRun, profile: ClusterProfile, knowledge: Knowledge) -> SeenRun:
    """Plan a run's own layout with the constants as they are.

    Raises what planning raises, and InvalidInputError for a time that no constant explains.
    """
    from hpctrain.plan.planner import decide
    from hpctrain.plan.request import PlanRequest
    from hpctrain.plan.uncertainty.learning import SeenRun

    partition = run.spec.resources.partition
    decision = decide(PlanRequest(run.spec, profile.for_partition(partition), knowledge))
    if decision.plan.step_seconds is None:
        raise InvalidInputError([Problem("the planner predicts no step time")])
    ratio = run.seconds / decision.plan.step_seconds
    if abs(math.log(ratio)) > math.log(_IMPLAUSIBLE):
        message = f"its steps took {ratio:.2g} times as long as planned, which no constant explains"
        raise InvalidInputError([Problem(message, run.origin.run)])
    return SeenRun(
        run=run.origin.run,
        request=decision.request,
        candidate=decision.found.candidate(decision.row),
        plan=decision.plan,
        seconds=run.seconds,
        allocated_bytes=run.allocated_bytes,
        reserved_bytes=run.reserved_bytes,
        pass_seconds=run.pass_seconds,
    )


def engine_learning(
    engine: str,
    runs: Sequence[tuple[MeasuredRun, SeenRun]],
    rates: dict[str, float],
    constants: str,
) -> EngineLearning:
    """Update the beliefs about one engine, and say what that changes for each run."""
    from hpctrain.plan.uncertainty.learning import learn

    lesson = learn([seen for _, seen in runs], rates)
    learned = SiteLearning(
        time=lesson.time,
        memory=lesson.memory,
        runs=tuple(_own_run(run, seen, lesson, number) for number, (run, seen) in enumerate(runs)),
        error=float(f"{lesson.error:.3g}"),
        constants=constants,
    )
    return EngineLearning(engine=engine, learned=learned, multipliers=lesson.multipliers)


def unexplained(learned: Iterable[SiteLearning]) -> list[str]:
    """Name runs that are still far from what is planned with what they have taught."""
    return [
        f"{run.run} still measures {run.measured_seconds / run.after_seconds:.2f} times what is "
        "planned, which own runs hardly ever do: find out why, or calibrate without it"
        for one in learned
        for run in one.runs
        if abs(math.log(run.measured_seconds / run.after_seconds)) > _ODD * one.error
    ]


def _own_run(run: MeasuredRun, seen: SeenRun, lesson: Lesson, number: int) -> OwnRun:
    after = lesson.reserved_bytes[number]
    return OwnRun(
        **vars(run.origin),
        measured_seconds=_rounded(run.seconds),
        before_seconds=_rounded(seen.planned_seconds),
        after_seconds=_rounded(lesson.seconds[number]),
        measured_bytes=run.reserved_bytes if after is not None else None,
        before_bytes=seen.planned_bytes if after is not None else None,
        after_bytes=round(after) if after is not None else None,
    )


def _rounded(number: float) -> float:
    return float(f"{number:.5g}")
