"""Turn measurements of a cluster into its calibration, and compare it with the packaged one.

Reads the report of `make gpu` (hpctrain.records.gpu_report), or `speed.jsonl` of a run, which has
the rates that a launch measured before training. Belongs here: reading, refusing what cannot be
true, the site's file: which one it is, writing it. Does not belong here: computing the shares (see
`hpctrain.site.measured_rates`), the tables (see `hpctrain.site.calibrate_command`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from hpctrain.base.durable import replace_text
from hpctrain.base.errors import HpctrainError, InvalidInputError, Problem, StorageError
from hpctrain.base.frozen import Frozen
from hpctrain.base.units import Bandwidth
from hpctrain.job.prepare import load_knowledge, site_knowledge
from hpctrain.plan.cost.from_spec import calibration_of, fabric_of
from hpctrain.plan.request import Knowledge
from hpctrain.records.gpu_report import GpuReport, StepTime
from hpctrain.records.layout import RunLayout
from hpctrain.records.speed_checks import SpeedCheck
from hpctrain.site.measured_rates import Measurements, measured_shares
from hpctrain.site.own_runs import (
    MeasuredRun,
    engine_learning,
    measured_job,
    planned_again,
    unexplained,
)
from hpctrain.spec.calibration import (
    FabricCalibration,
    GpuCalibration,
    SiteCalibration,
    constants_digest,
)
from hpctrain.spec.catalogue import Gpu, match_gpu
from hpctrain.spec.loader import (
    CALIBRATION_SUFFIX,
    PACKAGED_PROFILES,
    Loaded,
    calibrated_profile,
    calibration_file,
    find_profile,
    load_catalogue,
    load_document,
    load_named_profile,
    load_plain_profile,
    profile_search_path,
)
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.run import RunSpec

if TYPE_CHECKING:
    from hpctrain.plan.uncertainty.learning import SeenRun


SPEED_FILE = "speed.jsonl"
_NAMED_RUNS = 3  # in a hint


class CalibratedFigure(Frozen):
    """One figure: packaged, measured on this cluster, and the measurements behind it."""

    name: str
    packaged: float
    measured: float
    source: str


class CalibratedStep(Frozen):
    """One job: measured step time, planned with the packaged figures and with the new ones."""

    name: str
    gpus: int
    measured_seconds: float
    packaged_seconds: float | None = None
    calibrated_seconds: float | None = None
    problem: str | None = None


class CalibrationResult(Frozen):
    """What `hpctrain calibrate` has found; `path` is the file that it wrote.

    `usage`: whether plans use that file, and else what to do.
    """

    profile: str
    site: SiteCalibration
    figures: tuple[CalibratedFigure, ...]
    steps: tuple[CalibratedStep, ...] = ()
    remarks: tuple[str, ...] = ()
    path: str = ""
    usage: str = ""


@dataclass(frozen=True)
class _Read:
    """Measurements with the function that gives the position of a value in their file."""

    measurements: Measurements
    problem: Callable[[str, str, str | None], Problem]
    profile: str | None = None
    steps: tuple[StepTime, ...] = ()


def calibrate(
    result: Path, profile: str | None = None, output: Path | None = None
) -> CalibrationResult:
    """Compute the calibration of a cluster from `result`, and write it.

    `result` is a report of the rungs, `speed.jsonl` or a run directory with one. `output`: see
    `calibration_target`. Raises InvalidInputError with the position of each value that cannot be
    right.
    """
    read = _read(result)
    name = profile or read.profile
    if name is None:
        hint = "give the profile of the cluster: --profile NAME"
        raise InvalidInputError([Problem(f"{result}: contains no profile", hint=hint)])
    target = calibration_target(name, output)
    loaded = target.profile
    plain = loaded.document.model_copy(update={"calibration": None})
    packaged = load_knowledge(replace(loaded, document=plain))
    gpu = packaged.gpu
    if gpu is None:
        message = f"profile {loaded.document.name} describes no known GPU"
        raise InvalidInputError([loaded.problem("gpu", message, "name it in `gpu.model`")])
    own = calibration_of(packaged.calibration, gpu)
    fabric = fabric_of(packaged.calibration, loaded.document.network.fabric)
    problems = [read.problem(*one) for one in _other_gpus(read.measurements, gpu)]
    found, suspects = measured_shares(read.measurements, gpu, own)
    problems += [read.problem(suspect.path, suspect.message, suspect.hint) for suspect in suspects]
    if not found and not problems:
        message = "has no rate that a calibration is made of"
        problems.append(read.problem("", message, "run rung 3 of `make gpu` (docs/gpu.md)"))
    if problems:
        raise InvalidInputError(problems)
    provenance = _provenance(read, result)
    values: dict[str, float] = {
        share.name: Bandwidth(float(f"{share.value:.4g}"))
        if share.name.endswith("_bandwidth")
        else float(f"{share.value:.4g}")
        for share in found
    }
    site = SiteCalibration.model_validate({"gpu": gpu.name, "provenance": provenance, **values})
    site, remarks = _learned_from_steps(site, read.steps, loaded, packaged, gpu)
    calibrated = _at_site(packaged, site, gpu)
    if target.before is not None:
        site = site.model_copy(update={"serving": target.before.serving})
        remarks += _forgotten(target.before, site)
    write_site_calibration(target.path, site)
    before = packaged_rates(own, fabric, gpu)
    return CalibrationResult(
        profile=loaded.document.name,
        site=site,
        figures=tuple(
            CalibratedFigure(
                name=share.name,
                packaged=before[share.name],
                measured=float(getattr(site, share.name)),
                source=share.source,
            )
            for share in found
        ),
        steps=tuple(_step(step, loaded, packaged, calibrated) for step in read.steps),
        remarks=tuple(remarks),
        path=str(target.path),
        usage=how_plans_use(target.path, name),
    )


def packaged_rates(own: GpuCalibration, fabric: FabricCalibration, gpu: Gpu) -> dict[str, float]:
    """Return what is packaged for each field of a site's rates: shares, links in bytes/s."""
    return {
        "product_efficiency": own.product_efficiency,
        "flash_efficiency": own.flash_efficiency,
        "memory_efficiency": own.memory_efficiency,
        "nvlink_bandwidth": own.nvlink_efficiency * float(gpu.nvlink_bandwidth),
        "network_bandwidth": fabric.network_efficiency * float(gpu.network_bandwidth),
    }


def _read(result: Path) -> _Read:
    """Read a report, `speed.jsonl` or a run directory. Raises InvalidInputError."""
    if result.is_dir():
        if not (result / SPEED_FILE).is_file():
            # the directory has measured nothing; directories in it may be runs
            message = "is no run that has trained, no comparison and no service"
            runs = sorted(one for one in result.iterdir() if RunLayout(one).metrics.is_file())
            names = " ".join(map(str, runs[:_NAMED_RUNS])) + (
                " ..." if len(runs) > _NAMED_RUNS else ""
            )
            hint = f"give the runs in it: {names}" if runs else "`hpctrain status` lists runs"
            raise InvalidInputError([Problem(message, str(result), hint=hint)])
        result = result / SPEED_FILE
    if result.suffix == ".jsonl":
        return _read_lines(result)
    loaded = load_document(GpuReport, result)
    report = loaded.document
    return _Read(
        Measurements(report.speed, report.kernels), loaded.problem, report.profile, report.steps
    )


def _read_lines(path: Path) -> _Read:
    """Read the speed checks of a run's launches; each problem has the number of its line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        message = getattr(error, "strerror", None) or "is not UTF-8"
        raise InvalidInputError([Problem(message, file=str(path))]) from None
    checks = []
    for number, line in enumerate(lines, 1):
        try:
            checks.append(SpeedCheck.model_validate(json.loads(line)))
        except (ValueError, ValidationError):
            message = "is no record of a check before training"
            raise InvalidInputError([Problem(message, file=str(path), line=number)]) from None

    def problem(place: str, message: str, hint: str | None) -> Problem:
        number = int(place.split("[")[1].split("]")[0]) + 1 if "[" in place else None
        return Problem(f"{place.partition('.')[2]}: {message}", str(path), number, hint=hint)

    return _Read(Measurements(tuple(checks), ()), problem)


def _other_gpus(measurements: Measurements, gpu: Gpu) -> list[tuple[str, str, str]]:
    """Find measurements of a CPU or of another GPU than the profile's: (path, message, hint)."""
    catalogue, found = load_catalogue(profile_search_path()), []
    for path, name, memory in measurements.gpus():
        if name is None:
            message = "measured on a CPU in the place of a GPU: no calibration follows from it"
            found.append((path, message, "run the rungs on the cluster (docs/gpu.md)"))
            continue
        other = match_gpu(catalogue, name, memory)
        if (other is None and gpu.generation != "other") or (other and other.name != gpu.name):
            what = other.name if other else name
            message = f"measured on `{what}`, and the profile's GPU is `{gpu.name}`"
            found.append((path, message, "give the profile of the cluster that was measured"))
    return found


def _provenance(read: _Read, result: Path) -> str:
    from datetime import UTC, datetime

    times = [check.time for check in read.measurements.speed]
    day = f" on {datetime.fromtimestamp(max(times), UTC):%Y-%m-%d}" if times else ""
    nodes = {name for check in read.measurements.speed for name in check.nodes}
    where = f", {len(nodes)} {'node' if len(nodes) == 1 else 'nodes'}" if nodes else ""
    return f"measured{day}{where}: {result.name}"


def _learned_from_steps(
    site: SiteCalibration,
    steps: Sequence[StepTime],
    profile: Loaded[ClusterProfile],
    packaged: Knowledge,
    gpu: Gpu,
) -> tuple[SiteCalibration, list[str]]:
    """Let the jobs of a report teach what the rates have left open, as runs do.

    Jobs that cannot be planned, or whose time no constant explains, teach nothing, and are named.
    """
    knowledge, remarks = _at_site(packaged, site, gpu), []
    runs: dict[str, list[tuple[MeasuredRun, SeenRun]]] = {}
    for step in steps:
        try:
            spec = RunSpec.model_validate_json(step.spec, strict=True)
            run = measured_job(step.name, spec, step.measured_seconds)
            seen = planned_again(run, profile.document, knowledge)
        except ValidationError:
            remarks.append(f"{step.name} teaches nothing: its spec is not valid in this version")
            continue
        except HpctrainError as error:
            remarks.append(f"{step.name} teaches nothing: {_reason(error)}")
            continue
        runs.setdefault(spec.engine.name, []).append((run, seen))
    digest = constants_digest(knowledge.calibration)
    learned = {
        engine: engine_learning(engine, of_engine, {}, digest).learned
        for engine, of_engine in sorted(runs.items())
    }
    remarks += unexplained(learned.values())
    return site.model_copy(update={"learned": learned}), remarks


def _reason(error: HpctrainError) -> str:
    if isinstance(error, InvalidInputError):
        return error.problems[0].message
    return str(error).splitlines()[0]


def _at_site(packaged: Knowledge, site: SiteCalibration, gpu: Gpu) -> Knowledge:
    return site_knowledge(gpu, packaged.calibration, packaged.uncertainty, site)


def _planned_seconds(
    step: StepTime, profile: Loaded[ClusterProfile], knowledge: Knowledge
) -> tuple[float | None, str | None]:
    """Plan a measured job again: the step's seconds, or why it cannot be planned."""
    from hpctrain.plan.planner import make_plan  # with NumPy

    try:
        spec = RunSpec.model_validate_json(step.spec, strict=True)
        return make_plan(spec, profile.document, knowledge).step_seconds, None
    except ValidationError:
        return None, "its spec is not valid in this version"
    except HpctrainError as error:
        return None, str(error).splitlines()[0]


def _step(
    step: StepTime, profile: Loaded[ClusterProfile], packaged: Knowledge, calibrated: Knowledge
) -> CalibratedStep:
    before, problem = _planned_seconds(step, profile, packaged)
    after, _ = _planned_seconds(step, profile, calibrated)
    return CalibratedStep(
        name=step.name,
        gpus=step.gpus,
        measured_seconds=step.measured_seconds,
        packaged_seconds=before,
        calibrated_seconds=after,
        problem=problem,
    )


def _forgotten(before: SiteCalibration, site: SiteCalibration) -> list[str]:
    """Say what runs had taught on top of other rates, which goes with those rates."""
    now = {run.run for one in site.learned.values() for run in one.runs}
    gone = sorted({run.run for one in before.learned.values() for run in one.runs} - now)
    if not gone:
        return []
    names = ", ".join(gone)
    return [f"not kept, for it leaned on other rates, is what these have taught: {names}"]


# -- The file with what a site has measured: which one it is, what it holds already, writing it -


_HEADER = """\
# Measured on this cluster; written by `hpctrain calibrate`. Beside its profile it is used, else
# name it in `calibration` of the profile. Deleted, the packaged figures hold again. Shares are of
# the data sheet, bandwidths per GPU (docs/gpu.md); `learned` are logarithms (docs/certainty.md).
"""


@dataclass(frozen=True)
class CalibrationTarget:
    """Where `calibrate` writes: `path`, and the profile with what that file holds so far."""

    path: Path
    profile: Loaded[ClusterProfile]

    @property
    def before(self) -> SiteCalibration | None:
        """What was measured before; None where there is nothing yet."""
        found = self.profile.document.calibration
        return found if isinstance(found, SiteCalibration) else None


def calibration_target(name: str, output: Path | None) -> CalibrationTarget:
    """Find the file to write for a profile, and read what it holds.

    `output`; else the file that the profile names or that lies beside it, else
    NAME.calibration.yaml beside it, of a packaged profile in the current directory. A new file
    goes on from what the profile takes today. Raises InvalidInputError.
    """
    search_path = profile_search_path()
    file = find_profile(name, search_path)
    profile = load_plain_profile(file, search_path)
    taken = calibration_file(profile, file)
    directory = Path() if file.parent == PACKAGED_PROFILES else file.parent
    path = output or taken or directory / f"{profile.document.name}{CALIBRATION_SUFFIX}"
    held = next((one for one in (path, taken) if one is not None and one.is_file()), None)
    if held is None:
        return CalibrationTarget(path, profile)
    return CalibrationTarget(path, calibrated_profile(profile, held))


def write_site_calibration(path: Path, site: SiteCalibration) -> None:
    """Write the file that a profile takes. Raises StorageError."""
    try:
        replace_text(path, _HEADER + _yaml(site))
    except OSError as error:
        hint = "write it elsewhere with --output FILE, and name it in a profile: `calibration`"
        raise StorageError(f"{path}: cannot be written: {error.strerror}", hint) from None


def how_plans_use(path: Path, name: str | None) -> str:
    """Say whether plans use the file that was written for a profile, and else what to do.

    `name`: None where no profile was given.
    """
    if name is None:
        return (
            f"no plan uses it yet; to use it, write `calibration: {path.absolute()}` into the "
            "profile of the cluster"
        )
    place = load_named_profile(name).places.get("calibration.gpu")
    if place is not None and Path(place.file).resolve() == path.resolve():
        return "plans use it from now on, and say so; to undo it, delete the file"
    file = find_profile(name, profile_search_path())
    if file.parent == PACKAGED_PROFILES:
        return (
            f"no plan uses it yet; to use it, write a profile with `extends: {name}`, a `name` of "
            f"its own and `calibration: {path.absolute()}`"
        )
    line = path.name if path.resolve().parent == file.resolve().parent else path.absolute()
    return f"no plan uses it yet; to use it, write `calibration: {line}` into {file}"


def _yaml(site: SiteCalibration) -> str:
    """Format the document; lists of figures take one line each."""
    from ruamel.yaml import YAML

    yaml, stream = YAML(), StringIO()
    yaml.width = 4096  # one line each, whatever its length
    values = site.model_dump(mode="json", exclude_none=True)
    yaml.dump({name: _in_lines(value) for name, value in values.items() if value != {}}, stream)
    return stream.getvalue()


def _in_lines(value: Any) -> Any:
    """Mark lists without mappings and lists in them as written in one line."""
    from ruamel.yaml.comments import CommentedSeq

    if isinstance(value, dict):
        return {name: _in_lines(inner) for name, inner in value.items()}
    if not isinstance(value, list):
        return value
    found = CommentedSeq([_in_lines(inner) for inner in value])
    if not any(isinstance(inner, dict | list) for inner in value):
        found.fa.set_flow_style()
    return found
