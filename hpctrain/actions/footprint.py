"""Predicts what a run would write and ask of its site, before it is submitted.

Belongs here: preparing the run as `submit` does, and its forecast. Does not belong here: the
prediction (`hpctrain.plan.footprint`), text.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpctrain.actions.plan import run_facts
from hpctrain.actions.prepare import Prepared, prepare
from hpctrain.errors import DoesNotFitError
from hpctrain.plan.footprint.documents import Footprint
from hpctrain.plan.footprint.predict import footprint
from hpctrain.plan.forecast.predict import forecast
from hpctrain.units import short_duration

# Of a step where none is predicted: long enough for large models, short enough for small ones.
ASSUMED_STEP_SECONDS = 10.0


def predict_footprint(
    spec: Path, profile: str, overrides: Sequence[str], *, runs: Path
) -> Footprint:
    """Prepare the run that `submit` would make, and predict its footprint.

    Raises what preparing raises, and DoesNotFitError for a run that would make no progress.
    """
    return footprint_of(prepare(spec, profile, overrides, runs=runs))


def footprint_of(prepared: Prepared) -> Footprint:
    """Predict the footprint of a prepared run. Raises DoesNotFitError as a forecast does."""
    spec, profile, plan = prepared.spec.document, prepared.profile.document, prepared.plan
    assumed, facts = list[str](), run_facts(spec, profile, plan)
    if facts is None:
        known = plan.model_copy(update={"step_seconds": ASSUMED_STEP_SECONDS})
        facts = run_facts(spec, profile, known)
        seconds = short_duration(ASSUMED_STEP_SECONDS)
        assumed.append(f"step: {seconds}, because none is predicted for this GPU")
    assert facts is not None, "there is a step time"
    predicted = forecast(spec, profile, facts)
    assumed += [str(one) for one in predicted.assumptions]
    return footprint(
        spec,
        profile,
        plan,
        predicted,
        sizes=len(prepared.smaller),
        assumptions=tuple(assumed),
    )


def footprint_warnings(prepared: Prepared) -> tuple[str, ...]:
    """Say which limits of the site on files, bytes and RPCs the run would exceed.

    Empty where the site sets none, and for a run that no forecast can be made of.
    """
    limits = prepared.profile.document.limits
    if all(one is None for one in (limits.max_inodes, limits.max_bytes, limits.max_rpc_per_hour)):
        return ()
    try:
        return footprint_of(prepared).exceeded
    except DoesNotFitError:
        return ()
