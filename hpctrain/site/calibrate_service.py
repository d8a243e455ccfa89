"""Turn what a service has measured of itself into factors of the planner, for this site.

Reads the answers that `serve test` has recorded (`tests/*.jsonl`, one line per request), and what
engines show to Prometheus where it was kept (`tests/*.prom`, scrapes of one replica in the order of
their names). Belongs here: reading, refusing what cannot be used, writing the site's file. Does not
belong here: the fit (`hpctrain.serve.plan.measured_speed`), training (`calibrate`).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.base.frozen import Frozen
from hpctrain.records.service_layout import ServiceLayout
from hpctrain.serve.engines.registry import SERVING_ENGINES
from hpctrain.serve.load.measurement import RequestRecord
from hpctrain.serve.make_plan import read_model, service_request
from hpctrain.serve.plan.documents import ServicePlan
from hpctrain.site.calibrate import (
    CalibrationTarget,
    calibration_target,
    how_plans_use,
    write_site_calibration,
)
from hpctrain.spec.calibration import SiteCalibration, SiteServingCalibration
from hpctrain.spec.loader import (
    CALIBRATION_SUFFIX,
    Loaded,
    load_document,
    load_profile,
    load_service_spec,
)
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.service import ServingEngineName

if TYPE_CHECKING:
    from hpctrain.serve.plan.candidates import ReplicaShape
    from hpctrain.serve.plan.measured_speed import (
        EngineCounters,
        MeasuredIteration,
        RequestTimes,
    )
    from hpctrain.serve.plan.service_plan import ServiceRequest

_HINT = "`hpctrain serve test SERVICE` measures, and keeps what it measured"
_MOST_PROBLEMS = 10


class ServiceCalibrationResult(Frozen):
    """What `hpctrain calibrate SERVICE` has found; `path` is the file that it wrote.

    `error_before`: median distance of the logarithms of measured and predicted seconds, without the
    factors; `usage`: whether plans use that file, and else what to do.
    """

    profile: str
    engine: str
    gpu: str
    measured: SiteServingCalibration
    iterations: int
    answers: int
    error_before: float
    path: str = ""
    usage: str = ""


def is_service_directory(directory: Path) -> bool:
    """Whether `calibrate` was given the directory of a service."""
    layout = ServiceLayout(directory)
    return layout.spec.is_file() and layout.plan.is_file()


def calibrate_service(
    directory: Path, profile: str | None = None, output: Path | None = None
) -> ServiceCalibrationResult:
    """Fit the planner to a service's own measurements, and write the site's file.

    `profile`: default the service's own copy. Figures of training that the profile has stay as they
    are. Raises InvalidInputError for files that cannot be used.
    """
    from hpctrain.serve.plan.measured_speed import fit_speed, request_seconds, typical_error

    layout = ServiceLayout(directory)
    target = _target(layout, profile, output)
    loaded = target.profile
    spec = load_service_spec(layout.spec)
    plan = load_document(ServicePlan, layout.plan).document
    request = service_request(spec, loaded, read_model(spec), measured=False)
    shape = _shape(request, plan, loaded)
    answered = read_answers(sorted(layout.tests.glob("*.jsonl")))
    measured, times = _measured(layout, answered, plan)
    cost = shape.predicted_seconds
    speed = fit_speed(cost, measured)
    if speed is None or speed.log_deviation is None:
        message = f"{len(measured)} iterations could be read off its tests: too few"
        raise InvalidInputError([Problem(message, str(layout.tests), hint=_HINT)])
    outside = None if times is None else request_seconds(times, speed.corrected(cost))
    files = [*layout.tests.glob("*.jsonl"), *_scrapes(layout)]
    written = max((file.stat().st_mtime for file in files), default=0.0)
    day = datetime.fromtimestamp(written, UTC)
    answers = sum(map(len, answered))
    found = SiteServingCalibration(
        decode_factor=_rounded(speed.decode_factor),
        prompt_factor=_rounded(speed.prompt_factor),
        request_seconds=None if outside is None else _rounded(outside),
        error=_rounded(speed.log_deviation),
        provenance=f"service {layout.service_id}, {day:%Y-%m-%d}: {answers:,} answers, "
        f"{speed.iterations:,} iterations",
    )
    write_site_calibration(target.path, _joined(request, target, plan.replica.engine, found))
    return ServiceCalibrationResult(
        profile=loaded.document.name,
        engine=plan.replica.engine,
        gpu=request.offer.gpu.name,
        measured=found,
        iterations=speed.iterations,
        answers=answers,
        error_before=typical_error(cost, measured),
        path=str(target.path),
        usage=how_plans_use(target.path, profile),
    )


def _target(layout: ServiceLayout, profile: str | None, output: Path | None) -> CalibrationTarget:
    """Find the file to write: without a profile not beside the service's own copy, which would
    take it although the service has been planned without it."""
    if profile is None and output is None:
        name = load_profile(layout.profile).document.name
        output = Path(f"{name}{CALIBRATION_SUFFIX}")
    return calibration_target(profile or str(layout.profile), output)


def _shape(
    request: ServiceRequest, plan: ServicePlan, profile: Loaded[ClusterProfile]
) -> ReplicaShape:
    """Return the shape that the service runs. Raises InvalidInputError for another GPU."""
    from hpctrain.serve.plan.candidates import ReplicaShape

    replica = plan.replica
    if replica.gpu != request.offer.gpu.name:
        message = f"the service ran on `{replica.gpu}`, this cluster has `{request.offer.gpu.name}`"
        hint = "give the profile of the cluster on which it ran"
        raise InvalidInputError([profile.problem("gpu", message, hint)])
    return ReplicaShape(
        request.offer,
        request.model,
        request.engine,
        replica.tp,
        replica.pp,
        replica.precision,
        replica.kv_precision,
    )


def read_answers(files: Sequence[Path]) -> list[list[RequestRecord]]:
    """Read what tests have recorded, without requests that failed.

    Raises InvalidInputError with the lines that are no records.
    """
    tests, problems = [], []
    for file in files:
        records = []
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            try:
                records.append(RequestRecord.from_line(line))
            except (ValueError, TypeError, KeyError):
                problems.append(Problem("is no record of a request", str(file), number))
        tests.append([one for one in records if one.e2e_seconds is not None])
    if problems:
        raise InvalidInputError(problems[:_MOST_PROBLEMS])
    return tests


def _measured(
    layout: ServiceLayout, tests: Sequence[Sequence[RequestRecord]], plan: ServicePlan
) -> tuple[list[MeasuredIteration], RequestTimes | None]:
    """Collect iterations of all tests and scrapes, and the requests of the last test."""
    from hpctrain.serve.plan.measured_speed import iteration_between, iterations_of

    found, times = [], None
    for records in tests:
        if records:
            times = _times(records)
            found += iterations_of(times, plan.count)
    scrapes = [read_counters(file, plan.replica.engine) for file in _scrapes(layout)]
    for before, after in pairwise(scrapes):
        one = iteration_between(before, after)
        found += [] if one is None else [one]
    return found, times


def _times(records: Sequence[RequestRecord]) -> RequestTimes:
    from hpctrain.serve.plan.measured_speed import RequestTimes

    return RequestTimes.of(
        [
            (
                one.planned_seconds,
                one.first_token_seconds or 0.0,
                one.last_token_seconds or 0.0,
                float(one.prompt_tokens),
                float(one.answered_tokens),
            )
            for one in records
        ]
    )


def _scrapes(layout: ServiceLayout) -> list[Path]:
    return sorted(layout.tests.glob("*.prom"))


def read_counters(file: Path, engine: ServingEngineName) -> EngineCounters:
    """Read one scrape; the moment is that of its file. Raises InvalidInputError."""
    from prometheus_client.parser import text_string_to_metric_families

    from hpctrain.serve.plan.measured_speed import EngineCounters

    names = SERVING_ENGINES[engine].metrics
    totals: dict[str, float] = {}
    try:
        text = file.read_text(encoding="utf-8")
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    except (OSError, ValueError) as error:
        raise InvalidInputError(
            [Problem(f"is no text of Prometheus: {error}", str(file))]
        ) from None
    if names is None:
        raise InvalidInputError([Problem(f"engine {engine} shows no metrics", str(file))])
    wanted = {
        "prompt_tokens": names.prompt_tokens_total,
        "generated_tokens": names.generation_tokens_total,
        "tpot_sum_seconds": f"{names.tpot_seconds}_sum",
        "tpot_count": f"{names.tpot_seconds}_count",
        "requests": f"{names.ttft_seconds}_count",
    }
    missing = [name for name in wanted.values() if name not in totals]
    if missing:
        raise InvalidInputError([Problem(f"has no metric {missing[0]}", str(file))])
    values = {field: totals[name] for field, name in wanted.items()}
    return EngineCounters(moment_seconds=file.stat().st_mtime, **values)


def _joined(
    request: ServiceRequest,
    target: CalibrationTarget,
    engine: str,
    found: SiteServingCalibration,
) -> SiteCalibration:
    """Put the engine's factors beside what the profile has measured already."""
    before = target.before
    if before is None:
        return SiteCalibration(
            gpu=request.offer.gpu.name, serving={engine: found}, provenance=found.provenance
        )
    return before.model_copy(update={"serving": {**before.serving, engine: found}})


def _rounded(number: float) -> float:
    return float(f"{number:.4g}")
