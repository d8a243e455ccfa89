"""Let the planner learn from a site's own runs: `hpctrain calibrate RUN ...`.

Belongs here: the runs of one engine on one cluster, what they teach, writing that beside the
profile. Does not belong here: reading runs (`own_runs`), the update (`hpctrain.plan.uncertainty`),
rates that were measured one by one (`calibrate`), tables (`hpctrain.site.calibrate_command`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.base.errors import HpctrainError, InvalidInputError, Problem
from hpctrain.base.frozen import Frozen
from hpctrain.job.prepare import load_knowledge
from hpctrain.plan.cost.from_spec import calibration_of, fabric_of
from hpctrain.records.layout import RunLayout
from hpctrain.records.speed_checks import read_speed_checks
from hpctrain.records.sweeps import ComparisonLayout
from hpctrain.site.calibrate import (
    CalibrationTarget,
    calibration_target,
    how_plans_use,
    packaged_rates,
    write_site_calibration,
)
from hpctrain.site.measured_rates import Measurements, measured_shares
from hpctrain.site.own_runs import (
    EngineLearning,
    MeasuredRun,
    cpu_problems,
    engine_learning,
    planned_again,
    readable,
    unexplained,
)
from hpctrain.spec.calibration import (
    RATE_MULTIPLIERS,
    SiteCalibration,
    SiteLearning,
    constants_digest,
    measured_rates,
)
from hpctrain.spec.loader import (
    find_profile,
    load_catalogue,
    load_document,
    load_profile,
    profile_search_path,
)

if TYPE_CHECKING:
    from hpctrain.plan.request import Knowledge
    from hpctrain.plan.uncertainty.learning import SeenRun

MOST_RUNS = 10  # of one engine: more teach little, and each has to be planned again


class LearningResult(Frozen):
    """What `hpctrain calibrate RUN ...` has found; `path` is the file that it wrote.

    `refused`: runs that teach nothing, with the reason. `usage`: whether plans use that file, and
    else what to do.
    """

    profile: str
    gpu: str
    engines: tuple[EngineLearning, ...]
    refused: tuple[str, ...] = ()
    path: str = ""
    usage: str = ""
    remarks: tuple[str, ...] = ()


def are_runs(results: Sequence[Path]) -> bool:
    """Whether `calibrate` was given directories of runs that have trained, or of a comparison."""
    if any(ComparisonLayout(one).record.is_file() for one in results):
        return True
    layouts = [RunLayout(one) for one in results]
    return bool(layouts) and all(
        one.directory.is_dir() and one.metrics.is_file() for one in layouts
    )


def run_directories(results: Sequence[Path]) -> list[Path]:
    """List the directories of runs, those of a comparison's trials among them, each once."""
    from hpctrain.trials.documents import ComparisonRecord

    found: list[Path] = []
    for one in results:
        comparison = ComparisonLayout(one)
        if not comparison.record.is_file():
            found.append(one)
            continue
        record = load_document(ComparisonRecord, comparison.record).document
        found += [comparison.runs / trial.run_id for trial in record.trials if trial.run_id]
    return list({path.resolve(): path for path in found}.values())


def calibrate_runs(
    results: Sequence[Path], profile: str | None = None, output: Path | None = None
) -> LearningResult:
    """Learn from runs and trials, and write what was learned beside the profile.

    `profile`: default that of the first run, by its name. Runs that teach nothing are named with
    the reason; raises InvalidInputError where none is left. What other engines' runs, rates and
    services have taught before stays.
    """
    directories = sorted(run_directories(results), key=lambda path: path.name)
    name = profile or _profile_name(directories)
    target = calibration_target(name, output)
    loaded = target.profile
    knowledge = replace(load_knowledge(loaded), learned={}, outdated=())
    gpu = knowledge.gpu
    if gpu is None or knowledge.uncertainty is None:
        if on_cpus := cpu_problems(directories):
            raise InvalidInputError(on_cpus)
        message = f"profile {loaded.document.name} describes no known GPU"
        raise InvalidInputError([loaded.problem("gpu", message, "name it in `gpu.model`")])
    runs, problems = readable(directories, gpu, load_catalogue(profile_search_path()))
    priced: dict[str, list[tuple[MeasuredRun, SeenRun]]] = {}
    for run in runs:
        try:
            seen = planned_again(run, loaded.document, knowledge)
        except HpctrainError as error:
            problems.append(Problem(str(error).splitlines()[0], run.origin.run))
            continue
        priced.setdefault(run.spec.engine.name, []).append((run, seen))
    problems += [
        Problem(f"{len(of_engine)} runs of {engine} are more than {MOST_RUNS}", name)
        for engine, of_engine in priced.items()
        if len(of_engine) > MOST_RUNS
    ]
    if not priced or any(len(of_engine) > MOST_RUNS for of_engine in priced.values()):
        raise InvalidInputError(problems)
    taught = {run.origin.run for of_engine in priced.values() for run, _ in of_engine}
    layouts = [one for one in map(RunLayout, directories) if one.run_id in taught]
    rates = _rates(layouts, knowledge, loaded.document.network.fabric)
    constants = constants_digest(knowledge.calibration)
    engines = tuple(
        engine_learning(engine, of_engine, rates, constants)
        for engine, of_engine in sorted(priced.items())
    )
    site = _joined(target, gpu.name, {one.engine: one.learned for one in engines})
    write_site_calibration(target.path, site)
    return LearningResult(
        profile=loaded.document.name,
        gpu=gpu.name,
        engines=engines,
        refused=tuple(str(problem) for problem in problems),
        path=str(target.path),
        usage=how_plans_use(target.path, name),
        remarks=(
            *_from_elsewhere(priced, loaded.document.name),
            *unexplained(one.learned for one in engines),
        ),
    )


def _from_elsewhere(
    runs: Mapping[str, Sequence[tuple[MeasuredRun, SeenRun]]], profile: str
) -> list[str]:
    """Name runs that were submitted with another profile than the one that learns from them."""
    found = [run for of_engine in runs.values() for run, _ in of_engine if run.profile != profile]
    others = sorted({run.profile for run in found})
    return [
        f"{', '.join(run.origin.run for run in found if run.profile == other)}: submitted with "
        f"profile {other}, which is right if {profile} is that cluster"
        for other in others
    ]


def _profile_name(directories: Sequence[Path]) -> str:
    """Return the name of the first run's profile. Raises InvalidInputError without a run."""
    for directory in directories:
        file = RunLayout(directory).profile
        if file.is_file():
            name = load_profile(file).document.name
            try:
                find_profile(name, profile_search_path())
            except InvalidInputError:
                message = f"was submitted with profile `{name}`, which is not found by its name"
                problem = Problem(message, str(directory), hint="give its file: --profile FILE")
                raise InvalidInputError([problem]) from None
            return name
    raise InvalidInputError([Problem("no run has a profile", hint="--profile NAME")])


def _rates(layouts: Sequence[RunLayout], knowledge: Knowledge, fabric: str) -> dict[str, float]:
    """Turn what checks before training have measured into multipliers: logarithms by name.

    Rates that the profile has already, and values that cannot be true, say nothing here.
    """
    gpu = knowledge.gpu
    assert gpu is not None
    checks = [check for one in layouts for check in read_speed_checks(one)]
    good = tuple(check for check in checks if check.accelerator == "cuda" and not check.slow)
    own = calibration_of(knowledge.calibration, gpu)
    found, _ = measured_shares(Measurements(good, ()), gpu, own)
    expected = packaged_rates(own, fabric_of(knowledge.calibration, fabric), gpu)
    return {
        RATE_MULTIPLIERS[share.name]: math.log(expected[share.name] / share.value)
        for share in found
        if RATE_MULTIPLIERS[share.name] not in knowledge.measured
    }


def _joined(
    target: CalibrationTarget, gpu: str, learned: dict[str, SiteLearning]
) -> SiteCalibration:
    """Put what was learned beside what the cluster has measured already."""
    before = target.before
    joined = {**before.learned, **learned} if before is not None else learned
    if before is not None and (before.serving or measured_rates(before)):
        return before.model_copy(update={"learned": joined})
    count = sum(len(one.runs) for one in joined.values())
    last = max(run.day for one in joined.values() for run in one.runs)
    return SiteCalibration(
        gpu=gpu, learned=joined, provenance=f"own runs: {count}, the last on {last}"
    )
