"""Predicts what a run would write and ask of its site, before it is submitted.

Belongs here: preparing the run as `submit` does, its forecast, and reading the table. Does not
belong here: the prediction (`hpctrain.plan.footprint`), text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from hpctrain.base.errors import DoesNotFitError
from hpctrain.base.units import short_duration
from hpctrain.job.prepare import Prepared, PreparedRun, prepare
from hpctrain.job.render.script import log_files
from hpctrain.plan.footprint.predict import Footprint, footprint, run_size
from hpctrain.plan.footprint.table import FootprintTable, RunSize
from hpctrain.plan.forecast.documents import Forecast
from hpctrain.plan.forecast.predict import forecast, run_facts
from hpctrain.spec.files import load_packaged

PACKAGED_FOOTPRINT = Path(__file__).resolve().parents[1] / "plan" / "footprint" / "footprint.yaml"
# Of a step where none is predicted: long enough for large models, short enough for small ones.
ASSUMED_STEP_SECONDS = 10.0


@cache
def load_footprint_table() -> FootprintTable:
    """Load the packaged table of what runs write and ask, once per process."""
    return load_packaged(FootprintTable, PACKAGED_FOOTPRINT)


def predict_footprint(
    spec: Path, profile: str, overrides: Sequence[str], *, runs: Path
) -> Footprint:
    """Prepare the run that `submit` would make, and predict its footprint.

    Raises what preparing raises, and DoesNotFitError for a run that would make no progress.
    """
    return footprint_of(prepare(spec, profile, overrides, runs=runs))


def footprint_of(prepared: Prepared) -> Footprint:
    """Predict the footprint of a prepared run. Raises DoesNotFitError as a forecast does."""
    predicted, assumptions = _forecast_of(prepared)
    size = _size(prepared, predicted)
    return footprint(load_footprint_table(), prepared.job, predicted, size, assumptions)


def size_of(prepared: Prepared) -> RunSize:
    """Describe a prepared run by the numbers on which its footprint depends.

    Raises DoesNotFitError as a forecast does.
    """
    return _size(prepared, _forecast_of(prepared)[0])


def _size(prepared: Prepared, predicted: Forecast) -> RunSize:
    return run_size(
        prepared.job,
        predicted,
        logs=log_files(prepared.job),
        located=prepared.supervise.topology is not None,
        sizes=len(prepared.smaller),
    )


def _forecast_of(prepared: Prepared) -> tuple[Forecast, tuple[str, ...]]:
    """Make the forecast of a prepared run; return the assumptions behind it as well."""
    job, assumed = prepared.job, list[str]()
    facts = run_facts(job)
    if facts is None:
        known = job.plan.model_copy(update={"step_seconds": ASSUMED_STEP_SECONDS})
        facts = run_facts(replace(job, plan=known))
        seconds = short_duration(ASSUMED_STEP_SECONDS)
        assumed.append(f"step: {seconds}, because none is predicted for this GPU")
    assert facts is not None, "there is a step time"
    predicted = forecast(job.spec, job.profile, facts)
    return predicted, (*assumed, *map(str, predicted.assumptions))


def footprint_warnings(prepared: PreparedRun) -> tuple[str, ...]:
    """Say which limits of the site on files, bytes and RPCs the run would exceed.

    Empty where the site sets none, and for a run that no forecast can be made of.
    """
    limits = prepared.profile.document.limits
    if all(one is None for one in (limits.max_inodes, limits.max_bytes, limits.max_rpc_per_hour)):
        return ()
    if not isinstance(prepared, Prepared):
        return ()  # nobody knows what its trainer writes
    try:
        return footprint_of(prepared).exceeded
    except DoesNotFitError:
        return ()
