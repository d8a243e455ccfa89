"""Turn measurements of a cluster into its calibration, and compare it with the packaged one.

Reads the report of `make gpu` (hpctrain.store.gpu_report), or `speed.jsonl` of a run, which has
the rates that a launch measured before training. Belongs here: reading, refusing what cannot be
true, writing the site's file. Does not belong here: computing the shares (see
`hpctrain.actions.measured_rates`), the tables (see `hpctrain.cli.calibrate`).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from hpctrain.actions.measured_rates import Measurements, Share, Suspect, measured_shares
from hpctrain.actions.prepare import load_knowledge
from hpctrain.actions.profiles import load_named_profile, profile_search_path
from hpctrain.durable import replace_text
from hpctrain.errors import HpctrainError, InvalidInputError, Problem
from hpctrain.plan.request import Knowledge
from hpctrain.spec.calibration import Calibration, GpuCalibration, SiteCalibration
from hpctrain.spec.catalogue import Gpu, match_gpu
from hpctrain.spec.loader import (
    CALIBRATION_SUFFIX,
    Loaded,
    load_catalogue,
    load_document,
)
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.run import RunSpec
from hpctrain.store.gpu_report import GpuReport, StepTime
from hpctrain.store.speed_checks import SpeedCheck
from hpctrain.units import Bandwidth

SPEED_FILE = "speed.jsonl"
# A step's products run at lower clocks and beside other kernels, never faster than alone.
_LEAST_OF_PRODUCTS = 0.6
_FEWEST_JOBS = 3  # of one GPU, before their step times change a constant
_HEADER = """\
# Measured on this cluster; written by `hpctrain calibrate`. Name this file in `calibration` of the
# profile. Shares are of the data sheet, bandwidths per GPU. Fields: docs/gpu.md.
"""


class CalibratedFigure(BaseModel):
    """One figure: packaged, measured on this cluster, and the measurements behind it."""

    model_config = ConfigDict(frozen=True)

    name: str
    packaged: float
    measured: float
    source: str


class CalibratedStep(BaseModel):
    """One job: measured step time, planned with the packaged figures and with the new ones."""

    model_config = ConfigDict(frozen=True)

    name: str
    gpus: int
    measured_seconds: float
    packaged_seconds: float | None = None
    calibrated_seconds: float | None = None
    problem: str | None = None


class CalibrationResult(BaseModel):
    """What `hpctrain calibrate` has found; `path` is the file that it wrote."""

    model_config = ConfigDict(frozen=True)

    profile: str
    site: SiteCalibration
    figures: tuple[CalibratedFigure, ...]
    steps: tuple[CalibratedStep, ...] = ()
    remarks: tuple[str, ...] = ()
    path: str = ""


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

    `result` is a report of the rungs, `speed.jsonl` or a run directory with one. `output`: default
    NAME.calibration.yaml beside a profile given as a file, else in the current directory. Raises
    InvalidInputError with the position of each value that cannot be right.
    """
    read = _read(result)
    name = profile or read.profile
    if name is None:
        hint = "give the profile of the cluster: --profile NAME"
        raise InvalidInputError([Problem(f"{result}: contains no profile", hint=hint)])
    loaded = load_named_profile(name)
    packaged = load_knowledge(_without_calibration(loaded))
    gpu = packaged.gpu
    if gpu is None:
        message = f"profile {loaded.document.name} describes no known GPU"
        raise InvalidInputError([loaded.problem("gpu", message, "name it in `gpu.model`")])
    own = packaged_shares(packaged.calibration, gpu)
    problems = [read.problem(*one) for one in _other_gpus(read.measurements, gpu)]
    found, suspects = measured_shares(read.measurements, gpu, own)
    problems += [_positioned(read, suspect) for suspect in suspects]
    if not found and not problems:
        message = "has no rate that a calibration is made of"
        problems.append(read.problem("", message, "run rung 3 of `make gpu` (docs/gpu.md)"))
    if problems:
        raise InvalidInputError(problems)
    site = _site(found, gpu, _provenance(read, result))
    site, remarks = _fitted_to_steps(site, read.steps, loaded, packaged, gpu)
    calibrated = _at_site(packaged, site, gpu)
    path = output or site_calibration_path(loaded, name)
    write_site_calibration(path, _with_services(site, loaded))
    return CalibrationResult(
        profile=loaded.document.name,
        site=site,
        figures=tuple(_figures(found, site, own, packaged.calibration, gpu)),
        steps=tuple(_step(step, loaded, packaged, calibrated) for step in read.steps),
        remarks=tuple(remarks),
        path=str(path),
    )


def packaged_shares(calibration: Calibration, gpu: Gpu) -> GpuCalibration:
    """Return the packaged shares of a GPU."""
    from hpctrain.plan.cost.constants import calibration_of  # with NumPy

    return calibration_of(calibration, gpu)


def _read(result: Path) -> _Read:
    """Read a report, `speed.jsonl` or a run directory. Raises InvalidInputError."""
    if result.is_dir():
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


def _without_calibration(profile: Loaded[ClusterProfile]) -> Loaded[ClusterProfile]:
    from dataclasses import replace

    plain = profile.document.model_copy(update={"calibration": None})
    return replace(profile, document=plain)


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


def _positioned(read: _Read, suspect: Suspect) -> Problem:
    return read.problem(suspect.path, suspect.message, suspect.hint)


def _site(shares: Sequence[Share], gpu: Gpu, provenance: str) -> SiteCalibration:
    values: dict[str, float] = {
        share.name: Bandwidth(float(f"{share.value:.4g}"))
        if share.name.endswith("_bandwidth")
        else float(f"{share.value:.4g}")
        for share in shares
    }
    return SiteCalibration.model_validate({"gpu": gpu.name, "provenance": provenance, **values})


def _provenance(read: _Read, result: Path) -> str:
    from datetime import UTC, datetime

    times = [check.time for check in read.measurements.speed]
    day = f" on {datetime.fromtimestamp(max(times), UTC):%Y-%m-%d}" if times else ""
    nodes = {name for check in read.measurements.speed for name in check.nodes}
    where = f", {len(nodes)} {'node' if len(nodes) == 1 else 'nodes'}" if nodes else ""
    return f"measured{day}{where}: {result.name}"


def _fitted_to_steps(
    site: SiteCalibration,
    steps: Sequence[StepTime],
    profile: Loaded[ClusterProfile],
    packaged: Knowledge,
    gpu: Gpu,
) -> tuple[SiteCalibration, list[str]]:
    """Lower the rate of products until the median job of one GPU is planned as it was measured.

    The rate of products alone is the upper bound. Where even `_LEAST_OF_PRODUCTS` of it does not
    meet the measured times, something else is slow, and the rate stays.
    """
    alone = site.product_efficiency
    jobs = [step for step in steps if step.gpus == 1]
    if alone is None or len(jobs) < _FEWEST_JOBS:
        return site, []

    def planned_over_measured(share: float) -> float | None:
        changed = site.model_copy(update={"product_efficiency": share})
        knowledge = _at_site(packaged, changed, gpu)
        ratios = []
        for step in jobs:
            seconds, _ = _planned_seconds(step, profile, knowledge)
            if seconds is not None:
                ratios.append(seconds / step.measured_seconds)
        return statistics.median(ratios) if len(ratios) >= _FEWEST_JOBS else None

    low, high = _LEAST_OF_PRODUCTS * alone, alone
    at_low, at_high = planned_over_measured(low), planned_over_measured(high)
    if at_low is None or at_high is None:
        return site, ["the jobs of one GPU cannot be planned: their step times change nothing"]
    if at_high >= 1:
        share, note = high, "as products alone: steps are not slower than planned"
    elif at_low < 1:
        share = high
        note = (
            f"as products alone: steps are {1 / at_high:.2f} times as long as planned, "
            "which slower products cannot explain"
        )
    else:
        for _ in range(12):  # to 1e-4 of the interval
            middle = (low + high) / 2
            ratio = planned_over_measured(middle)
            low, high = (middle, high) if ratio is not None and ratio > 1 else (low, middle)
        share = (low + high) / 2
        note = f"from {alone:.3f} of products alone"
    share = float(f"{share:.4g}")
    remark = f"product_efficiency {share:.3f} by {len(jobs)} jobs of one GPU: {note}"
    return site.model_copy(update={"product_efficiency": share}), [remark]


def _at_site(packaged: Knowledge, site: SiteCalibration, gpu: Gpu) -> Knowledge:
    from hpctrain.plan.cost.constants import calibrated_at_site  # with NumPy

    return Knowledge(gpu, calibrated_at_site(packaged.calibration, site, gpu))


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


def _figures(
    shares: Sequence[Share],
    site: SiteCalibration,
    own: GpuCalibration,
    calibration: Calibration,
    gpu: Gpu,
) -> list[CalibratedFigure]:
    """Compare each figure with the packaged one, links in bytes per second."""
    network = statistics.median(one.network_efficiency for one in calibration.software.values())
    packaged = {
        "product_efficiency": own.product_efficiency,
        "flash_efficiency": own.flash_efficiency,
        "memory_efficiency": own.memory_efficiency,
        "nvlink_bandwidth": own.nvlink_efficiency * float(gpu.nvlink_bandwidth),
        "network_bandwidth": network * float(gpu.network_bandwidth),
    }
    return [
        CalibratedFigure(
            name=share.name,
            packaged=packaged[share.name],
            measured=float(getattr(site, share.name)),
            source=share.source,
        )
        for share in shares
    ]


def _with_services(site: SiteCalibration, profile: Loaded[ClusterProfile]) -> SiteCalibration:
    """Keep what services have measured on this cluster before."""
    before = profile.document.calibration
    if not isinstance(before, SiteCalibration):
        return site
    return site.model_copy(update={"serving": before.serving})


def write_site_calibration(path: Path, site: SiteCalibration) -> None:
    """Write the file that a profile names in `calibration`. Raises OSError."""
    replace_text(path, _HEADER + _yaml(site))


def site_calibration_path(profile: Loaded[ClusterProfile], name: str) -> Path:
    """Name the file after the profile, beside it where the user gave a file."""
    directory = Path(name).parent if "/" in name or name.endswith((".yaml", ".yml")) else Path()
    return directory / f"{profile.document.name}{CALIBRATION_SUFFIX}"


def _yaml(site: SiteCalibration) -> str:
    from ruamel.yaml import YAML

    yaml, stream = YAML(), StringIO()
    yaml.width = 90
    values = site.model_dump(mode="json", exclude_none=True)
    yaml.dump({name: value for name, value in values.items() if value != {}}, stream)
    return stream.getvalue()
